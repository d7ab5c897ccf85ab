/* moebius.hook.native: the module, its self-tests and its switches. */
#include "native.h"

#include <stdlib.h>
#include <string.h>

PyObject *mb_absent;
int mb_disabled;

int
mb_guard_error(void)
{
    if (PyErr_ExceptionMatches(PyExc_Exception)) {
        PyErr_Clear();
        return 0;
    }
    return -1;
}

int
mb_no_memory(void)
{
    PyErr_NoMemory();
    return -1;
}

PyObject *
mb_still_there(PyObject *weak)
{
#if PY_VERSION_HEX >= 0x030D0000
    PyObject *object;
    return PyWeakref_GetRef(weak, &object) > 0 ? object : NULL;
#else
    PyObject *object = PyWeakref_GET_OBJECT(weak);
    return object == Py_None ? NULL : Py_NewRef(object);
#endif
}

/* ---- ABSENT ---- */

static PyObject *
absent_repr(PyObject *Py_UNUSED(self))
{
    return PyUnicode_FromString("ABSENT");
}

static PyTypeObject Absent_Type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "moebius.hook.native.Absent",
    .tp_basicsize = sizeof(PyObject),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .tp_doc = "The type of ABSENT: a key or attribute that does not exist.",
    .tp_repr = absent_repr,
};

/* ---- the module ---- */

static PyObject *
disable(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(unused))
{
    mb_disabled = 1;
    Py_RETURN_NONE;
}

static PyObject *
enable(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(unused))
{
    mb_disabled = 0;
    Py_RETURN_NONE;
}

static PyObject *
is_disabled(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(unused))
{
    return PyBool_FromLong(mb_disabled);
}

static PyObject *
features(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(unused))
{
    return Py_BuildValue("{s:N,s:N,s:N,s:N,s:N,s:N,s:s,s:n}", "dict_tags", PyBool_FromLong(mb_dict_tags), "instance_dict_tags",
                         PyBool_FromLong(mb_instance_tags), "class_tags", PyBool_FromLong(mb_class_tags),
                         "dict_watchers", PyBool_FromLong(mb_dict_watchers), "instance_dict_watchers",
                         PyBool_FromLong(mb_instance_watchers), "class_watchers", PyBool_FromLong(mb_class_watchers),
                         "tensor_reading", mb_tensor_reading(), "tensor_block", mb_tensor_block());
}

static PyObject *
copy_set(PyObject *Py_UNUSED(module), PyObject *from)
{
    if (!PySet_CheckExact(from)) {
        PyErr_SetString(PyExc_TypeError, "copy_set needs a set");
        return NULL;
    }
    return mb_copy_set(from);
}

static PyObject *
uncounted(PyObject *Py_UNUSED(module), PyObject *object)
{
    return mb_is_counted(object) ? PyObject_GetIter(object) : Py_NewRef(object);
}

static PyObject *
own_attributes(PyObject *Py_UNUSED(module), PyObject *type)
{
    if (!PyType_Check(type)) {
        PyErr_SetString(PyExc_TypeError, "own_attributes needs a type");
        return NULL;
    }
    PyTypeObject *t = (PyTypeObject *)type;
    return Py_BuildValue("(NN)", PyBool_FromLong(t->tp_getattro != PyObject_GenericGetAttr),
                         PyBool_FromLong(t->tp_setattro != PyObject_GenericSetAttr));
}

static PyMethodDef methods[] = {
    {"own_attributes", own_attributes, METH_O, NULL},
    {"uncounted", uncounted, METH_O, NULL},
    {"copy_set", copy_set, METH_O, NULL},
    {"finish", mb_finish, METH_O, NULL},
    {"leave_to", (PyCFunction)(void (*)(void))mb_leave_to, METH_FASTCALL, NULL},
    {"leave_to_call", mb_leave_to_call, METH_VARARGS, NULL},
    {"call_timed", (PyCFunction)(void (*)(void))mb_call_timed, METH_FASTCALL | METH_KEYWORDS, NULL},
    {"call_with_cells", mb_call_with_cells, METH_VARARGS, NULL},
    {"set_own_tracer", mb_set_own_tracer, METH_O, NULL},
    {"is_traced", mb_is_traced, METH_NOARGS, NULL},
    {"disable", disable, METH_NOARGS, NULL},
    {"enable", enable, METH_NOARGS, NULL},
    {"is_disabled", is_disabled, METH_NOARGS, NULL},
    {"features", features, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static int
execute(PyObject *module)
{
    if (PyInterpreterState_Get() != PyInterpreterState_Main()) {
        PyErr_SetString(PyExc_ImportError, "moebius cannot be used in a subinterpreter: its frame hook and the state that "
                                           "it keeps on code objects belong to the main interpreter. Import it there.");
        return -1;
    }
    const char *off = getenv("MOEBIUS_DISABLE");
    mb_disabled = off != NULL && *off != '\0' && strcmp(off, "0") != 0;
    if (PyType_Ready(&Absent_Type) < 0 || PyType_Ready(&mb_GuardProgram_Type) < 0 || PyType_Ready(&mb_Entry_Type) < 0 ||
        PyType_Ready(&mb_Continuation_Type) < 0) {
        return -1;
    }
    if (mb_absent == NULL && (mb_absent = PyObject_New(PyObject, &Absent_Type)) == NULL) {
        return -1;
    }
    PyObject *checks = mb_check_names();
    int added = checks == NULL ? -1 : PyModule_AddObjectRef(module, "CHECKS", checks);
    Py_XDECREF(checks);
    if (added < 0 || PyModule_AddObjectRef(module, "ABSENT", mb_absent) < 0 ||
        PyModule_AddObjectRef(module, "Entry", (PyObject *)&mb_Entry_Type) < 0 ||
        PyModule_AddObjectRef(module, "GuardProgram", (PyObject *)&mb_GuardProgram_Type) < 0 ||
        PyModule_AddFunctions(module, mb_frame_methods) < 0 || PyModule_AddFunctions(module, mb_tensor_methods) < 0 ||
        PyModule_AddFunctions(module, mb_overlap_methods) < 0) {
        return -1;
    }
    if (PyModule_AddFunctions(module, mb_watcher_methods) < 0 || mb_watchers_init() < 0) {
        return -1;
    }
    if (mb_tensors_init(module) < 0 || mb_frames_init(module) < 0) {
        return -1;
    }
    return mb_self_test();
}

static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, execute},
#if PY_VERSION_HEX >= 0x030C0000
    /* Not because it is: so that a subinterpreter gets as far as `execute` and its clear refusal, before anything is made. */
    {Py_mod_multiple_interpreters, Py_MOD_PER_INTERPRETER_GIL_SUPPORTED},
#endif
    {0, NULL},
};

static PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "moebius.hook.native",
    .m_doc = "Guarded calls and the frame hook, in C against CPython's headers alone.",
    .m_methods = methods,
    .m_slots = slots,
};

PyMODINIT_FUNC
PyInit_native(void)
{
    return PyModuleDef_Init(&definition);
}
