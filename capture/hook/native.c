/* moebius.hook.native: the module, its self-tests and its switches. */
#include "native.h"

#include <stdlib.h>
#include <string.h>

PyObject *mb_absent;
int mb_disabled, mb_dict_tags, mb_instance_tags, mb_class_tags;

int
mb_guard_error(void)
{
    if (PyErr_ExceptionMatches(PyExc_Exception)) {
        PyErr_Clear();
        return 0;
    }
    return -1;
}

/* ---- ABSENT ---- */

static PyObject *
absent_repr(PyObject *self)
{
    (void)self;
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

/* ---- self-tests: do version tags notice every way of writing? ---- */

static const char self_test_source[] =
    "class Base: attribute = 0\n"
    "class Class(Base): pass\n"
    "class Plain: pass\n"
    "instance = Plain()\n"
    "instance.value = 0\n"
    "instance_dict = instance.__dict__\n"
    "plain_dict = {'value': 0}\n"
    "name = 0\n"
    "def write_instance(i): instance.value = i\n"
    "def write_setattr(i): setattr(instance, 'value', i)\n"
    "def write_again(i):\n"
    "    del instance.value\n"
    "    instance.value = i\n"
    "def write_dict(i): plain_dict['value'] = i\n"
    "def write_global(i):\n"
    "    global name\n"
    "    name = i\n"
    "def write_class(i): Class.attribute = i\n"
    "def write_base(i): Base.attribute = i\n"
    "Class.attribute\n";

/* Calls namespace[writer] often enough for CPython to specialise it; 1 if the tag changed each time. */
static int
tag_follows(PyObject *namespace, const char *writer, PyObject *dict, PyTypeObject *type)
{
    static const int rounds = 200;
    PyObject *function = PyDict_GetItemString(namespace, writer);
    PyObject *attribute = PyUnicode_InternFromString("attribute");
    int follows = function == NULL || attribute == NULL ? -1 : 1;
    for (int i = 0; i < rounds && follows >= 0; i++) {
        if (type != NULL) {
            mb_type_lookup(type, attribute);    /* gives the class a tag again */
        }
        uint64_t before = type != NULL ? mb_type_tag(type) : mb_dict_tag(dict);
        PyObject *result = PyObject_CallFunction(function, "i", i + 1000);
        if (result == NULL) {
            follows = -1;
            break;
        }
        Py_DECREF(result);
        /* No tag at all is also a notice: such a class is looked at each time. */
        if (before != 0 && before == (type != NULL ? mb_type_tag(type) : mb_dict_tag(dict))) {
            follows = 0;
        }
    }
    Py_XDECREF(attribute);
    return follows;
}

static int
self_test(void)
{
    PyObject *namespace = PyDict_New();
    if (namespace == NULL || PyDict_SetItemString(namespace, "__builtins__", PyEval_GetBuiltins()) < 0 ||
        PyDict_SetItemString(namespace, "__name__", Py_None) < 0) {
        Py_XDECREF(namespace);
        return -1;
    }
    PyObject *done = PyRun_String(self_test_source, Py_file_input, namespace, namespace);
    int result = -1;
    if (done != NULL) {
        Py_DECREF(done);
        PyTypeObject *type = (PyTypeObject *)PyDict_GetItemString(namespace, "Class");
        int dict = tag_follows(namespace, "write_dict", PyDict_GetItemString(namespace, "plain_dict"), NULL);
        int global = dict < 0 ? -1 : tag_follows(namespace, "write_global", namespace, NULL);
        int instance = global;
        static const char *const writers[] = {"write_instance", "write_setattr", "write_again"};
        for (size_t i = 0; i < Py_ARRAY_LENGTH(writers) && instance > 0; i++) {
            instance = tag_follows(namespace, writers[i], PyDict_GetItemString(namespace, "instance_dict"), NULL);
        }
        int class = instance < 0 ? -1 : tag_follows(namespace, "write_class", NULL, type);
        int base = class < 0 ? -1 : tag_follows(namespace, "write_base", NULL, type);
        if (base >= 0) {
            mb_dict_tags = dict && global;
            mb_instance_tags = mb_dict_tags && instance;
            mb_class_tags = class && base;
            result = 0;
        }
    }
    PyDict_Clear(namespace);    /* its functions refer to it */
    Py_DECREF(namespace);
    return result;
}

/* ---- the module ---- */

static PyObject *
disable(PyObject *module, PyObject *unused)
{
    (void)module, (void)unused;
    mb_disabled = 1;
    Py_RETURN_NONE;
}

static PyObject *
enable(PyObject *module, PyObject *unused)
{
    (void)module, (void)unused;
    mb_disabled = 0;
    Py_RETURN_NONE;
}

static PyObject *
is_disabled(PyObject *module, PyObject *unused)
{
    (void)module, (void)unused;
    return PyBool_FromLong(mb_disabled);
}

static PyObject *
features(PyObject *module, PyObject *unused)
{
    (void)module, (void)unused;
    return Py_BuildValue("{s:N,s:N,s:N,s:s,s:n}", "dict_tags", PyBool_FromLong(mb_dict_tags), "instance_dict_tags",
                         PyBool_FromLong(mb_instance_tags), "class_tags", PyBool_FromLong(mb_class_tags),
                         "tensor_reading", mb_tensor_reading(), "tensor_block", mb_tensor_block());
}

static PyMethodDef methods[] = {
    {"disable", disable, METH_NOARGS, "disable(): every Entry calls its function natively, until enable()."},
    {"enable", enable, METH_NOARGS, "enable(): undo disable()."},
    {"is_disabled", is_disabled, METH_NOARGS, "is_disabled() -> bool"},
    {"features", features, METH_NOARGS,
     "features() -> dict: what the self-tests found on this Python (dict_tags, instance_dict_tags, class_tags: bool) and "
     "how tensors are read (tensor_reading: 'memory' or 'attributes'; tensor_block: words compared at once, 0: none)."},
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
    if (PyType_Ready(&Absent_Type) < 0 || PyType_Ready(&mb_GuardProgram_Type) < 0 || PyType_Ready(&mb_Entry_Type) < 0) {
        return -1;
    }
    if (mb_absent == NULL && (mb_absent = PyObject_New(PyObject, &Absent_Type)) == NULL) {
        return -1;
    }
    if (PyModule_AddObjectRef(module, "ABSENT", mb_absent) < 0 ||
        PyModule_AddObjectRef(module, "Entry", (PyObject *)&mb_Entry_Type) < 0 ||
        PyModule_AddObjectRef(module, "GuardProgram", (PyObject *)&mb_GuardProgram_Type) < 0 ||
        PyModule_AddFunctions(module, mb_frame_methods) < 0 || PyModule_AddFunctions(module, mb_tensor_methods) < 0) {
        return -1;
    }
    if (mb_tensors_init(module) < 0 || mb_frames_init(module) < 0) {
        return -1;
    }
    return self_test();
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
