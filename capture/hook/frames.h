/* What frames.c and notes.c share. */
#ifndef MOEBIUS_FRAMES_H
#define MOEBIUS_FRAMES_H

#include "native.h"

typedef enum { UNKNOWN, DECLINED, SKIPPED, LEFT_ALONE, ATTACHED } Verdict;    /* LEFT_ALONE: with all that it calls */

/* Whose native code is running: what one captured function makes of a frame is not another's, which has options of its own. */
typedef unsigned long long Owner;
#define ANYONE 0

typedef struct Claim {
    Owner owner;
    int pass_function;              /* callable(function, *arguments) */
    PyObject *callable;             /* runs in the frame's place; an owner's: a weak reference */
    PyObject *function;             /* weak reference to the function that it is for; NULL: any function */
    PyObject *kept;                 /* likewise to callable.function, which has its globals and cells; NULL: none */
    struct Claim *next;
} Claim;

typedef struct CodeNote {
    Verdict verdict;
    Claim *claims;                  /* ATTACHED: at least one */
    struct CodeNote *next, *previous;
} CodeNote;

extern PyObject *mb_frame_callback;    /* NULL: none */

static inline int
mb_is_marked(const CodeNote *note)    /* for good */
{
    return note->verdict == SKIPPED || note->verdict == LEFT_ALONE;
}

CodeNote *mb_note_of(PyObject *code, int make);    /* borrowed; NULL without an error if there is none and `make` is 0 */
void mb_clear_note(CodeNote *note, Verdict verdict);
/* 0, -1. For anyone: in place of all that was there. */
int mb_attach_to(CodeNote *note, Owner owner, PyObject *function, PyObject *callable, int pass_function);
void mb_drop_claim(CodeNote *note, Owner owner);    /* and those of owners who are gone */
Claim *mb_claim_of(CodeNote *note, Owner owner);    /* NULL: none */
/* 1 with a new reference to what runs in the function's place; 0: it is for another; -1: it, or who it was for, is gone. */
int mb_is_for(const Claim *claim, PyObject *function, PyObject **callable);
int mb_notes_init(PyObject *module);

#endif
