/* At import: do version tags and watchers notice every way of writing, on this very Python? */
#include "native.h"

int mb_dict_tags, mb_instance_tags, mb_class_tags, mb_dict_watchers, mb_instance_watchers, mb_class_watchers;

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

/* What changes with a write: a version tag, or the number of writes that a watcher was told of. */
typedef uint64_t (*Reading)(PyObject *);

static uint64_t
type_tag(PyObject *type)
{
    return mb_type_tag((PyTypeObject *)type);
}

/* Calls namespace[writer] often enough for CPython to specialise it; 1 if the reading changed each time, 0, or -1. */
static int
follows(PyObject *namespace, const char *writer, PyObject *object, Reading read)
{
    static const int rounds = 200;
    PyObject *function = PyDict_GetItemString(namespace, writer);
    PyObject *attribute = PyUnicode_InternFromString("attribute");
    int result = function == NULL || attribute == NULL ? -1 : 1;
    for (int i = 0; i < rounds && result >= 0; i++) {
        if (PyType_Check(object)) {
            mb_type_lookup((PyTypeObject *)object, attribute);    /* gives the class a tag again */
            if (mb_type_tag((PyTypeObject *)object) == 0) {
                break;    /* such a class is looked at each time */
            }
        }
        uint64_t before = read(object);
        PyObject *done = PyObject_CallFunction(function, "i", i + 1000);
        if (done == NULL) {
            result = -1;
            break;
        }
        Py_DECREF(done);
        if (before == read(object)) {
            result = 0;
        }
    }
    Py_XDECREF(attribute);
    return result;
}

typedef struct {
    int dicts, instances, classes;
} Found;

/* What the readings follow; 0, or -1 with an error. */
static int
find(PyObject *namespace, Reading of_dict, Reading of_class, Found *found)
{
    static const struct {
        const char *writer, *object;    /* object: NULL is the namespace itself */
        int kind;
    } writes[] = {
        {"write_dict", "plain_dict", 0},        {"write_global", NULL, 0},   {"write_instance", "instance_dict", 1},
        {"write_setattr", "instance_dict", 1},  {"write_again", "instance_dict", 1},
        {"write_class", "Class", 2},            {"write_base", "Class", 2},
    };
    int noticed[3] = {1, 1, 1};
    for (size_t i = 0; i < Py_ARRAY_LENGTH(writes); i++) {
        PyObject *object = writes[i].object == NULL ? namespace : PyDict_GetItemString(namespace, writes[i].object);
        int kind = writes[i].kind;
        int one = object == NULL ? -1 : follows(namespace, writes[i].writer, object, kind == 2 ? of_class : of_dict);
        if (one < 0) {
            return -1;
        }
        noticed[kind] &= one;
    }
    *found = (Found){noticed[0], noticed[0] && noticed[1], noticed[2]};
    return 0;
}

static int
find_watchers(PyObject *namespace, Found *found)
{
    PyObject *watched[] = {namespace, PyDict_GetItemString(namespace, "plain_dict"),
                           PyDict_GetItemString(namespace, "instance_dict"), PyDict_GetItemString(namespace, "Class")};
    int all = 1, result = 0;
    for (size_t i = 0; i < Py_ARRAY_LENGTH(watched); i++) {
        all &= watched[i] != NULL && mb_watch_one(watched[i], 1);
    }
    if (all) {
        result = find(namespace, mb_watch_events, mb_watch_events, found);
    }
    for (size_t i = 0; i < Py_ARRAY_LENGTH(watched); i++) {
        if (watched[i] != NULL) {
            mb_watch_one(watched[i], 0);
        }
    }
    return result;
}

int
mb_self_test(void)
{
    PyObject *namespace = PyDict_New();
    if (namespace == NULL || PyDict_SetItemString(namespace, "__builtins__", PyEval_GetBuiltins()) < 0 ||
        PyDict_SetItemString(namespace, "__name__", Py_None) < 0) {
        Py_XDECREF(namespace);
        return -1;
    }
    PyObject *done = PyRun_String(self_test_source, Py_file_input, namespace, namespace);
    int result = -1;
    Found tags, watchers = {0, 0, 0};
    if (done != NULL && find(namespace, mb_dict_tag, type_tag, &tags) == 0 && find_watchers(namespace, &watchers) == 0) {
        mb_dict_tags = tags.dicts;
        mb_instance_tags = tags.instances;
        mb_class_tags = tags.classes;
        mb_dict_watchers = watchers.dicts;
        mb_instance_watchers = watchers.instances;
        mb_class_watchers = watchers.classes;
        result = 0;
    }
    Py_XDECREF(done);
    PyDict_Clear(namespace);    /* its functions refer to it */
    Py_DECREF(namespace);
    return result;
}
