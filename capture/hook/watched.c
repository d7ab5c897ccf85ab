/* Checks on objects known from the start: one comparison each while nobody writes to them. */
#include "native.h"

/* What a dict holds, or a class gives when it is looked up, is what is expected, key by key. */
static int
same_entries(Check *check)
{
    PyObject *key, *expected;
    Py_ssize_t position = 0;
    while (PyDict_Next(check->expected, &position, &key, &expected)) {
        PyObject *value = Py_XNewRef(check->kind == CHECK_DICT ? PyDict_GetItemWithError(check->object, key)
                                                               : mb_type_lookup((PyTypeObject *)check->object, key));
        if (value == NULL) {
            if (PyErr_Occurred()) {
                return -1;
            }
            if (expected != mb_absent) {
                return 0;
            }
            continue;
        }
        int same = expected == mb_absent ? 0 : mb_same_value(value, expected);
        Py_DECREF(value);
        if (same <= 0) {
            return same;
        }
    }
    return 1;
}

static int
same_dict(Check *check)
{
    int same = same_entries(check);
    return same <= 0 || check->order == NULL ? same : mb_same_keys(check->object, check->order);
}

static int
check_dict(Check *check, TagWatch *watch)
{
    uint64_t tag = mb_dict_tag(check->object);
    int same = same_dict(check);
    /* The tag from before the look: a write meanwhile leaves another one in the dict. An OrderedDict's order, and on
     * 3.13.0 values that live inside the instance, change without a new tag: those are looked at each time. */
    int memoise = mb_dict_tags && (mb_instance_tags || !mb_dict_shares_values(check->object)) &&
                  !(check->order != NULL && PyODict_Check(check->object) && PyTuple_GET_SIZE(check->order) > 1);
    watch->tag = same == 1 && memoise ? tag : NO_TAG;
    return same;
}

static int
same_class(Check *check)
{
    PyObject *mro = ((PyTypeObject *)check->object)->tp_mro;
    if (mro == NULL || PyTuple_GET_SIZE(mro) != PyTuple_GET_SIZE(check->order)) {
        return 0;
    }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(mro); i++) {
        if (PyTuple_GET_ITEM(mro, i) != PyTuple_GET_ITEM(check->order, i)) {
            return 0;
        }
    }
    return same_entries(check);
}

static int
check_class(Check *check, TagWatch *watch)
{
    uint64_t tag = mb_type_tag((PyTypeObject *)check->object);
    int same = same_class(check);
    if (same == 1 && tag == 0) {
        /* The look-up may just have given the class a tag. Only then is a second look worth it. */
        tag = mb_type_tag((PyTypeObject *)check->object);
        same = tag == 0 ? 1 : same_class(check);
    }
    watch->tag = same == 1 && mb_class_tags && tag != 0 ? tag : NO_TAG;
    return same;
}

/* Class and __dict__ of an instance: `x.__class__ = C` and `x.__dict__ = d` leave no other trace. */
static int
check_instance(Check *check, InstanceWatch *watch)
{
    watch->where = NULL;
    if ((PyObject *)Py_TYPE(check->object) != check->order) {
        return 0;
    }
    if (check->expected == NULL) {
        watch->where = &watch->dict;    /* any: compare it with itself */
        return 1;
    }
    PyObject **where = mb_dict_pointer(check->object);
    if (where == NULL || *where != check->expected) {
        return PyErr_Occurred() ? -1 : 0;
    }
    watch->where = where;
    return 1;
}

int
mb_watched(CheckKind kind)
{
    return kind >= CHECK_DICT;
}

static inline int
instance_unchanged(const InstanceWatch *watch)
{
    return (PyObject *)Py_TYPE(watch->object) == watch->type && watch->where != NULL && *watch->where == watch->dict;
}

static inline int
function_unchanged(const FunctionWatch *watch)
{
    const PyFunctionObject *f = watch->function;
    return f->func_code == watch->code && f->func_defaults == watch->defaults && f->func_kwdefaults == watch->kwdefaults;
}

/* For a dict, class or instance: one comparison while nobody writes to it. */
int
mb_run_watch(GuardProgram *p, Check *check)
{
    int holds;
    if (check->kind == CHECK_DICT) {
        TagWatch *watch = &p->watches[0].tags[check->watch];
        holds = mb_dict_tag(watch->object) == watch->tag ? 1 : check_dict(check, watch);
    }
    else if (check->kind == CHECK_CLASS) {
        TagWatch *watch = &p->watches[1].tags[check->watch];
        holds = mb_type_tag((PyTypeObject *)watch->object) == watch->tag ? 1 : check_class(check, watch);
    }
    else if (check->kind == CHECK_INSTANCE) {
        InstanceWatch *watch = &p->watches[2].instances[check->watch];
        holds = instance_unchanged(watch) ? 1 : check_instance(check, watch);
    }
    else if (check->kind == CHECK_FUNCTION) {
        holds = function_unchanged(&p->watches[4].functions[check->watch]);
    }
    else {
        holds = mb_tensor_check(check->meta, check->object);
    }
    return holds < 0 ? mb_guard_error() : holds;
}

/* All checks of one kind on objects known from the start: 1, 0 or -1. The objects lie all over memory, so those that come
 * next are asked for in advance. */
int
mb_sweep(GuardProgram *p, CheckKind kind)
{
    enum { AHEAD = 12, NEAR = 4 };
    int holds = 1;
    Watches *watches = &p->watches[kind - CHECK_DICT];
    int n = watches->count;
    if (watches->told) {
        return mb_sweep_told(p, kind);
    }
    switch (kind) {
    case CHECK_DICT:
        for (int i = 0; i < n && holds == 1; i++) {
            TagWatch *watch = &watches->tags[i];
            if (i + AHEAD < n) {
                __builtin_prefetch((char *)watch[AHEAD].object + sizeof(PyObject));
            }
            if (mb_dict_tag(watch->object) != watch->tag) {
                holds = mb_run_watch(p, &p->checks[watches->checks[i]]);
            }
        }
        break;
    case CHECK_CLASS:
        for (int i = 0; i < n && holds == 1; i++) {
            TagWatch *watch = &watches->tags[i];
            if (mb_type_tag((PyTypeObject *)watch->object) != watch->tag) {
                holds = mb_run_watch(p, &p->checks[watches->checks[i]]);
            }
        }
        break;
    case CHECK_INSTANCE:
        for (int i = 0; i < n && holds == 1; i++) {
            InstanceWatch *watch = &watches->instances[i];
            if (i + AHEAD < n) {
                __builtin_prefetch(watch[AHEAD].object);
            }
            if (!instance_unchanged(watch)) {
                holds = mb_run_watch(p, &p->checks[watches->checks[i]]);
            }
        }
        break;
    case CHECK_FUNCTION:
        for (int i = 0; i < n && holds == 1; i++) {
            holds = function_unchanged(&watches->functions[i]);
        }
        break;
    default:
        for (int i = 0; i < n && holds == 1; i++) {
            TensorWatch *watch = &watches->tensors[i];
            if (i + AHEAD < n) {
                mb_tensor_prefetch(watch[AHEAD].object, watch[AHEAD].meta, 0);
            }
            if (i + NEAR < n) {
                mb_tensor_prefetch(watch[NEAR].object, watch[NEAR].meta, 1);
            }
            holds = mb_tensor_check(watch->meta, watch->object);
        }
    }
    return holds < 0 ? mb_guard_error() : holds;
}
