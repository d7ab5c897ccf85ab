/* Ending a frame that never ran: a frame hook was given it, and has done its work in another way.
 *
 * Both hooks need this, capture's and the interpreter's. From 3.12 on the evaluator itself has to clear and pop the frame,
 * and CPython exports no function that does only that: the frame is made to run `return None`. */
#ifndef MOEBIUS_END_FRAME_H
#define MOEBIUS_END_FRAME_H

#include "cpython_private.h"

#if PY_VERSION_HEX >= 0x030C0000
static PyCodeObject *mb_return_none;

/* `return None` without RESUME: frames that run it are invisible to tracing. Up to 3.13 it is one instruction that uses no
 * stack; from 3.14 two that use one place of it, which each code object has that returns. */
static inline PyCodeObject *
mb_make_return_none(void)
{
    static const char source[] =
        "from opcode import opmap\n"
        "ops = ['RETURN_CONST'] if 'RETURN_CONST' in opmap else ['LOAD_CONST', 'RETURN_VALUE']\n"
        "code = (lambda: None).__code__.replace(co_code=b''.join(bytes([opmap[op], 0]) for op in ops), "
        "co_consts=(None,), co_name='return_none', co_qualname='return_none')\n";
    PyObject *namespace = PyDict_New(), *code = NULL;
    if (namespace != NULL && PyDict_SetItemString(namespace, "__builtins__", PyEval_GetBuiltins()) == 0) {
        PyObject *done = PyRun_String(source, Py_file_input, namespace, namespace);
        code = done == NULL ? NULL : Py_XNewRef(PyDict_GetItemString(namespace, "code"));
        Py_XDECREF(done);
    }
    Py_XDECREF(namespace);
    return (PyCodeObject *)code;
}
#endif

/* Whether frames can be ended, before the first: if not, an exception is set. */
static inline int
mb_can_end_frames(void)
{
#if PY_VERSION_HEX >= 0x030C0000
    return mb_return_none != NULL || (mb_return_none = mb_make_return_none()) != NULL;
#else
    return 1;
#endif
}

/* Ends a frame that never ran, with this result (NULL: an exception is set). */
static inline PyObject *
mb_end_frame(PyThreadState *tstate, mb_Frame *frame, PyObject *result)
{
#if PY_VERSION_HEX >= 0x030C0000
    PyObject *error = result == NULL ? PyErr_GetRaisedException() : NULL;
    mb_frame_swap_code(frame, mb_return_none);
    PyObject *none = _PyEval_EvalFrameDefault(tstate, frame, 0);
    if (none == NULL) {
        Py_CLEAR(result);
        Py_XDECREF(error);
        return NULL;
    }
    Py_DECREF(none);
    if (error != NULL) {
        PyErr_SetRaisedException(error);
    }
#else
    (void)tstate, (void)frame;    /* 3.11: the caller clears the frame, whatever became of it */
#endif
    return result;
}

#endif
