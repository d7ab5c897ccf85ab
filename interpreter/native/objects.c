/* Looks at types and objects that run no Python of the program's: attributes along an MRO, flags, kinds, and a few things that
 * only C can do to an object. The domain asks them of operands before it knows whose code an operation will run. */
#define MOEBIUS_NEEDS_FRAMES
#include "cpython_private.h"
#include "objects.h"

#include <stddef.h>

static PyObject *missing;         /* what `lookup` gives for nothing */
static PyObject *native_kinds;    /* frozenset: types of attributes that run C code when a special method is wanted */

static PyObject *
set_lookup(PyObject *module, PyObject *args)
{
    PyObject *mark, *kinds;
    (void)module;
    if (!PyArg_ParseTuple(args, "OO!:set_lookup", &mark, &PyFrozenSet_Type, &kinds)) {
        return NULL;
    }
    Py_XSETREF(missing, Py_NewRef(mark));
    Py_XSETREF(native_kinds, Py_NewRef(kinds));
    Py_RETURN_NONE;
}

static int
lookup_arguments(PyObject *const *args, Py_ssize_t n)
{
    if (n != 2 || !PyType_Check(args[0]) || !PyUnicode_Check(args[1])) {
        PyErr_SetString(PyExc_TypeError, "a type and an attribute's name");
        return -1;
    }
    return 0;
}

static PyObject *
lookup(PyObject *module, PyObject *const *args, Py_ssize_t n)
{
    (void)module;
    if (lookup_arguments(args, n) < 0) {
        return NULL;
    }
    PyObject *found = _PyType_Lookup((PyTypeObject *)args[0], args[1]);
    return Py_NewRef(found == NULL ? missing : found);
}

static PyObject *
special(PyObject *module, PyObject *const *args, Py_ssize_t n)
{
    (void)module;
    if (lookup_arguments(args, n) < 0) {
        return NULL;
    }
    if (!PyType_HasFeature((PyTypeObject *)args[0], Py_TPFLAGS_HEAPTYPE)) {
        Py_RETURN_NONE;
    }
    PyObject *found = _PyType_Lookup((PyTypeObject *)args[0], args[1]);
    if (found == NULL || PySet_Contains(native_kinds, (PyObject *)Py_TYPE(found)) == 1) {
        Py_RETURN_NONE;
    }
    return Py_NewRef(found);
}

static PyObject *
flags_of(PyObject *module, PyObject *type)
{
    (void)module;
    if (!PyType_Check(type)) {
        PyErr_SetString(PyExc_TypeError, "a type");
        return NULL;
    }
    return PyLong_FromUnsignedLong(PyType_GetFlags((PyTypeObject *)type));
}

static PyObject *
reads_plainly(PyObject *module, PyObject *type)
{
    (void)module;
    return PyBool_FromLong(PyType_Check(type) && ((PyTypeObject *)type)->tp_getattro == PyObject_GenericGetAttr);
}

static PyObject *
mro_of(PyObject *module, PyObject *type)
{
    (void)module;
    if (!PyType_Check(type)) {
        PyErr_SetString(PyExc_TypeError, "a type");
        return NULL;
    }
    PyObject *mro = ((PyTypeObject *)type)->tp_mro;
    return mro == NULL ? PyTuple_New(0) : Py_NewRef(mro);
}

static PyObject *
type_name(PyObject *module, PyObject *type)
{
    (void)module;
    if (!PyType_Check(type)) {
        PyErr_SetString(PyExc_TypeError, "a type");
        return NULL;
    }
    return PyUnicode_FromString(((PyTypeObject *)type)->tp_name);
}

static PyObject *
full_name(PyObject *module, PyObject *type)
{
#if PY_VERSION_HEX >= 0x030D0000
    if (PyType_Check(type)) {
        return PyType_GetFullyQualifiedName((PyTypeObject *)type);
    }
#endif
    return type_name(module, type);
}

/* Like isinstance() and issubclass(), but for a type's own fields alone: nobody's __class__ or __eq__ is asked. */
static PyObject *
is_a(PyObject *module, PyObject *const *args, Py_ssize_t n)
{
    (void)module;
    if (n != 2 || !(PyType_Check(args[1]) || PyTuple_Check(args[1]))) {
        PyErr_SetString(PyExc_TypeError, "is_a(object, type or tuple of types)");
        return NULL;
    }
    if (PyType_Check(args[1])) {
        return PyBool_FromLong(PyObject_TypeCheck(args[0], (PyTypeObject *)args[1]));
    }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(args[1]); i++) {
        PyObject *kind = PyTuple_GET_ITEM(args[1], i);
        if (PyType_Check(kind) && PyObject_TypeCheck(args[0], (PyTypeObject *)kind)) {
            Py_RETURN_TRUE;
        }
    }
    Py_RETURN_FALSE;
}

/* issubclass(type(object), kinds), which metaclasses and unions answer for themselves; the usual kinds are answered here. */
static PyObject *
is_kind(PyObject *module, PyObject *const *args, Py_ssize_t n)
{
    (void)module;
    if (n != 2) {
        PyErr_SetString(PyExc_TypeError, "is_kind(object, kinds)");
        return NULL;
    }
    PyTypeObject *type = Py_TYPE(args[0]);
    PyObject *kinds = args[1];
    if (PyType_CheckExact(kinds)) {
        return PyBool_FromLong(PyType_IsSubtype(type, (PyTypeObject *)kinds));
    }
    if (PyTuple_CheckExact(kinds)) {
        for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(kinds); i++) {
            PyObject *kind = PyTuple_GET_ITEM(kinds, i);
            if (PyType_CheckExact(kind) && PyType_IsSubtype(type, (PyTypeObject *)kind)) {
                Py_RETURN_TRUE;
            }
        }
    }
    int found = PyObject_IsSubclass((PyObject *)type, kinds);
    return found < 0 ? NULL : PyBool_FromLong(found);
}

static PyObject *
is_subtype(PyObject *module, PyObject *const *args, Py_ssize_t n)
{
    (void)module;
    if (n != 2 || !PyType_Check(args[0]) || !PyType_Check(args[1])) {
        PyErr_SetString(PyExc_TypeError, "is_subtype(type, type)");
        return NULL;
    }
    return PyBool_FromLong(PyType_IsSubtype((PyTypeObject *)args[0], (PyTypeObject *)args[1]));
}

/* Whether a method of a C type is sq_concat's, sq_repeat's or their in-place kin's: those come after all number slots. */
static PyObject *
is_sequence_slot(PyObject *module, PyObject *method)
{
    (void)module;
    if (!Py_IS_TYPE(method, &PyWrapperDescr_Type)) {
        Py_RETURN_FALSE;
    }
    int offset = ((PyWrapperDescrObject *)method)->d_base->offset;
    return PyBool_FromLong(offset == (int)offsetof(PyHeapTypeObject, as_sequence.sq_concat) ||
                           offset == (int)offsetof(PyHeapTypeObject, as_sequence.sq_repeat) ||
                           offset == (int)offsetof(PyHeapTypeObject, as_sequence.sq_inplace_concat) ||
                           offset == (int)offsetof(PyHeapTypeObject, as_sequence.sq_inplace_repeat));
}

static PyObject *
is_heap(PyObject *module, PyObject *type)
{
    (void)module;
    return PyBool_FromLong(PyType_Check(type) && PyType_HasFeature((PyTypeObject *)type, Py_TPFLAGS_HEAPTYPE));
}

static PyObject *
is_class(PyObject *module, PyObject *object)
{
    (void)module;
    return PyBool_FromLong(PyType_Check(object));
}

static PyObject *
write_unraisable(PyObject *module, PyObject *args)
{
    PyObject *error, *object;
    (void)module;
    if (!PyArg_ParseTuple(args, "O!O:write_unraisable", (PyTypeObject *)PyExc_BaseException, &error, &object)) {
        return NULL;
    }
    PyErr_SetObject((PyObject *)Py_TYPE(error), error);
    PyErr_WriteUnraisable(object);
    Py_RETURN_NONE;
}

static PyObject *
fill_frame(PyObject *module, PyObject *const *args, Py_ssize_t n)
{
    (void)module;
    if (n != 3 || !PyFrame_Check(args[0]) || !PyList_CheckExact(args[1])) {
        PyErr_SetString(PyExc_TypeError, "fill_frame(frame, list, unset)");
        return NULL;
    }
    PyCodeObject *code = PyFrame_GetCode((PyFrameObject *)args[0]);
    int fits = code->co_nlocalsplus == PyList_GET_SIZE(args[1]);
    Py_DECREF(code);
    if (!fits) {
        PyErr_SetString(PyExc_ValueError, "the frame has another number of variables");
        return NULL;
    }
    for (int i = 0; i < (int)PyList_GET_SIZE(args[1]); i++) {
        PyObject *value = PyList_GET_ITEM(args[1], i);
        mb_set_frame_variable((PyFrameObject *)args[0], i, value == args[2] ? NULL : value);
    }
    Py_RETURN_NONE;
}

static PyObject *
set_frame_names(PyObject *module, PyObject *const *args, Py_ssize_t n)
{
    (void)module;
    if (n != 2 || !PyFrame_Check(args[0])) {
        PyErr_SetString(PyExc_TypeError, "set_frame_names(frame, mapping)");
        return NULL;
    }
    PyCodeObject *code = PyFrame_GetCode((PyFrameObject *)args[0]);
    int optimized = code->co_flags & CO_OPTIMIZED;
    Py_DECREF(code);
    if (optimized) {
        PyErr_SetString(PyExc_ValueError, "a function's frame has no namespace");
        return NULL;
    }
    mb_set_frame_names((PyFrameObject *)args[0], args[1]);
    Py_RETURN_NONE;
}

static PyObject *
link_frame(PyObject *module, PyObject *const *args, Py_ssize_t n)
{
    (void)module;
    if (n != 3 || !PyFrame_Check(args[0]) || !(args[1] == Py_None || PyFrame_Check(args[1]))) {
        PyErr_SetString(PyExc_TypeError, "link_frame(frame, frame or None, dict or None)");
        return NULL;
    }
    PyFrameObject *back = args[1] == Py_None ? NULL : (PyFrameObject *)args[1];
    mb_link_frame((PyFrameObject *)args[0], back, args[2] == Py_None ? NULL : args[2]);
    Py_RETURN_NONE;
}

static PyObject *
is_mapping(PyObject *module, PyObject *object)
{
    (void)module;
    return PyBool_FromLong(PyMapping_Check(object));
}

static PyObject *
merge_keywords(PyObject *module, PyObject *const *args, Py_ssize_t n)
{
    (void)module;
    if (n != 2 || !PyDict_CheckExact(args[0]) || !PyDict_Check(args[1])) {
        PyErr_SetString(PyExc_TypeError, "merge_keywords(dict, dict)");
        return NULL;
    }
    if (mb_merge_unique(args[0], args[1]) < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyObject *
untrack(PyObject *module, PyObject *object)
{
    (void)module;
    if (PyObject_GC_IsTracked(object)) {
        PyObject_GC_UnTrack(object);
    }
    Py_RETURN_NONE;
}

PyMethodDef mb_object_functions[] = {
    {"set_lookup", set_lookup, METH_VARARGS,
     "set_lookup(missing, kinds): what lookup() gives for nothing, the types of attributes that special() leaves out."},
    {"lookup", (PyCFunction)(void (*)(void))lookup, METH_FASTCALL,
     "lookup(type, name): the raw attribute along the MRO, or the mark of set_lookup. Runs no __getattribute__."},
    {"special", (PyCFunction)(void (*)(void))special, METH_FASTCALL,
     "special(type, name): the raw attribute along the MRO where calling it would run Python code, else None."},
    {"flags_of", flags_of, METH_O, "flags_of(type) -> int: its tp_flags."},
    {"reads_plainly", reads_plainly, METH_O,
     "reads_plainly(type) -> bool: attributes of its objects are read as object reads them (PyObject_GenericGetAttr)."},
    {"mro_of", mro_of, METH_O, "mro_of(type) -> tuple: its tp_mro, empty while it is being made."},
    {"type_name", type_name, METH_O, "type_name(type) -> str: its tp_name."},
    {"full_name", full_name, METH_O, "full_name(type) -> str: PyType_GetFullyQualifiedName; up to 3.12 its tp_name."},
    {"is_a", (PyCFunction)(void (*)(void))is_a, METH_FASTCALL,
     "is_a(object, type or tuple) -> bool: by the object's real type; nothing is asked for its __class__."},
    {"is_kind", (PyCFunction)(void (*)(void))is_kind, METH_FASTCALL,
     "is_kind(object, kinds) -> bool: issubclass(type(object), kinds)."},
    {"is_subtype", (PyCFunction)(void (*)(void))is_subtype, METH_FASTCALL, "is_subtype(type, type): PyType_IsSubtype."},
    {"is_sequence_slot", is_sequence_slot, METH_O,
     "is_sequence_slot(method) -> bool: a + or * of a C type's that runs after both operands' number slots."},
    {"is_heap", is_heap, METH_O, "is_heap(type) -> bool: it can hold Python code."},
    {"is_mapping", is_mapping, METH_O, "is_mapping(object) -> bool: PyMapping_Check."},
    {"is_class", is_class, METH_O, "is_class(object) -> bool: PyType_Check."},
    {"fill_frame", (PyCFunction)(void (*)(void))fill_frame, METH_FASTCALL,
     "fill_frame(frame, list, unset): the frame's local variables become the list's values; those that are unset, unbound."},
    {"set_frame_names", (PyCFunction)(void (*)(void))set_frame_names, METH_FASTCALL,
     "set_frame_names(frame, mapping): the namespace of a module's or class body's frame, its f_locals."},
    {"link_frame", (PyCFunction)(void (*)(void))link_frame, METH_FASTCALL,
     "link_frame(frame, back, locals): the frame object of a call that is over keeps its caller's, and the dict of locals()."},
    {"merge_keywords", (PyCFunction)(void (*)(void))merge_keywords, METH_FASTCALL,
     "merge_keywords(dict, dict): the second's entries go into the first; KeyError(key) at one that is there already."},
    {"untrack", untrack, METH_O, "untrack(object): gc.get_objects() does not list it."},
    {"write_unraisable", write_unraisable, METH_VARARGS,
     "write_unraisable(exception, object): PyErr_WriteUnraisable."},
    {NULL, NULL, 0, NULL},
};
