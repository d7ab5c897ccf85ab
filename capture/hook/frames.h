/* What frames.c and notes.c share. */
#ifndef MOEBIUS_FRAMES_H
#define MOEBIUS_FRAMES_H

#include "native.h"

typedef enum { UNKNOWN, DECLINED, SKIPPED, ATTACHED } Verdict;

typedef struct CodeNote {
    Verdict verdict;
    int pass_function;              /* callable(function, *arguments) */
    PyObject *callable;             /* ATTACHED */
    PyObject *function;             /* ATTACHED: weak reference to the function that it is for; NULL: any function */
    struct CodeNote *next, *previous;
} CodeNote;

extern PyObject *mb_frame_callback;    /* NULL: none */

CodeNote *mb_note_of(PyObject *code, int make);    /* borrowed; NULL without an error if there is none and `make` is 0 */
void mb_clear_note(CodeNote *note, Verdict verdict);
int mb_attach_to(CodeNote *note, PyObject *function, PyObject *callable, int pass_function);    /* 0, -1 */
int mb_is_for(CodeNote *note, PyObject *function);    /* 1, 0; -1: it was for a function that is gone */
int mb_notes_init(PyObject *module);

#endif
