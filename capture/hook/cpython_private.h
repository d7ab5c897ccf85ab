/* Every name of CPython's that is not part of its stable or documented API, and nothing else of ours.
 *
 * name                                    3.11    3.12    3.13    used for
 * --------------------------------------- ------- ------- ------- --------------------------------------------------
 * PyDictObject.ma_version_tag             yes     deprec. deprec. a dict that was not written to since it was checked
 * PyDictObject.ma_values                  yes     yes     yes     3.13.0: instance dicts whose tag misses writes
 * PyTypeObject.tp_version_tag             yes     yes     yes     a class (and its bases) that was not written to
 * _PyType_Lookup                          yes     yes     yes     MRO look-up without descriptors; borrowed result
 * struct _PyInterpreterFrame              f_func  f_funcobj       the frame that the evaluator is about to run
 *   code                                  f_code  f_code  f_executable
 *   next instruction                      prev_instr + 1  instr_ptr
 * _PyInterpreterState_{Get,Set}EvalFrameFunc  PEP 523, all three  the frame hook
 * _PyEval_EvalFrameDefault                yes     yes     yes     CPython's own evaluator
 * _PyEval_RequestCodeExtraIndex           yes     PyUnstable_Eval_RequestCodeExtraIndex
 * _PyCode_GetExtra, _PyCode_SetExtra      yes     PyUnstable_Code_GetExtra, _SetExtra: what we know of a code object
 *
 * Read in the headers of 3.11.7, 3.12.1 and 3.13.0 and run on them. The struct layouts come from the headers of the
 * Python that this is built for, so another patch release needs a rebuild at most.
 */
#ifndef MOEBIUS_CPYTHON_PRIVATE_H
#define MOEBIUS_CPYTHON_PRIVATE_H

#include <Python.h>

#if PY_VERSION_HEX < 0x030B0000 || PY_VERSION_HEX >= 0x030E0000
#error "moebius supports CPython 3.11, 3.12 and 3.13. Build it with one of those (see README.md)."
#endif
#ifdef Py_GIL_DISABLED
#error "moebius does not support the free-threaded build of CPython yet. Build it with the default build of 3.11-3.13."
#endif
#if defined(PYPY_VERSION) || defined(GRAALVM_PYTHON)
#error "moebius needs CPython: its frame hook is PEP 523, which other Pythons lack."
#endif

#ifdef MOEBIUS_NEEDS_FRAMES
#ifndef Py_BUILD_CORE
#define Py_BUILD_CORE 1
#endif
#include <internal/pycore_frame.h>
#undef Py_BUILD_CORE
#endif

#include <stdint.h>

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"
/* Globally unique; changes with each write to the dict. */
static inline uint64_t
mb_dict_tag(PyObject *dict)
{
    return ((PyDictObject *)dict)->ma_version_tag;
}
#pragma GCC diagnostic pop

/* Whether the values live outside the dict's own table (split table; on 3.13 possibly inside the instance). */
static inline int
mb_dict_shares_values(PyObject *dict)
{
    return ((PyDictObject *)dict)->ma_values != NULL;
}

/* Changes when the class or one of its bases is written to; 0 when CPython has not given it one. */
static inline uint32_t
mb_type_tag(PyTypeObject *type)
{
    return type->tp_version_tag;
}

/* The class attribute that an instance's attribute access would meet first; borrowed; NULL without an error if none. */
static inline PyObject *
mb_type_lookup(PyTypeObject *type, PyObject *name)
{
    return _PyType_Lookup(type, name);
}

#if PY_VERSION_HEX >= 0x030C0000
#define mb_request_code_extra PyUnstable_Eval_RequestCodeExtraIndex
#define mb_code_get_extra PyUnstable_Code_GetExtra
#define mb_code_set_extra PyUnstable_Code_SetExtra
#else
#define mb_request_code_extra _PyEval_RequestCodeExtraIndex
#define mb_code_get_extra _PyCode_GetExtra
#define mb_code_set_extra _PyCode_SetExtra
#endif

#endif
