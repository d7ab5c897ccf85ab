/* Dict and class watchers, of CPython 3.12 and later: who writes to a dict or class says so, so that a program looks at
 * those alone that were written to since it last held. An untouched model costs nothing, however many modules it has.
 *
 * Sources: PyDict_AddWatcher, PyType_AddWatcher (C API, "Dictionary Objects", "Type Objects"); Objects/dictobject.c,
 * Objects/typeobject.c. A dict's watcher is called before the write, a class's only while the class has a version tag. */
#include "native.h"

#include <string.h>

#if PY_VERSION_HEX >= 0x030C0000

/* One program's interest in one object. All of them hang in one hash table by the object's address. */
struct Subscription {
    PyObject *object;       /* borrowed: the program's check holds it */
    GuardProgram *program;
    Watches *watches;
    int index;
    Subscription *next;
};

static Subscription **buckets;
static size_t n_buckets, n_subscriptions;    /* n_buckets: a power of two */
static int dict_watcher = -1, class_watcher = -1, in_use = 1;
static uint64_t events;

static inline Subscription **
bucket_of(PyObject *object)
{
    return &buckets[((uintptr_t)object >> 4) * 0x9E3779B97F4A7C15u >> 20 & (n_buckets - 1)];
}

static inline void
mark_stale(Watches *watches, int index)
{
    watches->marks++;
    if (watches->state[index] == SETTLED) {
        watches->state[index] = STALE;
        watches->stale[watches->n_stale++] = index;
    }
}

static void
written(PyObject *object)
{
    events++;
    if (n_buckets == 0) {
        return;
    }
    for (Subscription *s = *bucket_of(object); s != NULL; s = s->next) {
        if (s->object == object) {
            mark_stale(s->watches, s->index);
        }
    }
}

static int
on_dict_event(PyDict_WatchEvent Py_UNUSED(event), PyObject *dict, PyObject *Py_UNUSED(key), PyObject *Py_UNUSED(value))
{
    written(dict);
    return 0;
}

static int
on_class_event(PyTypeObject *type)
{
    written((PyObject *)type);
    return 0;
}

static int
make_room(size_t wanted)
{
    size_t n = n_buckets == 0 ? 256 : n_buckets;
    while (n < wanted) {
        n *= 2;
    }
    if (n == n_buckets) {
        return 0;
    }
    Subscription **old = buckets, **fresh = PyMem_Calloc(n, sizeof(Subscription *));
    size_t n_old = n_buckets;
    if (fresh == NULL) {
        return mb_no_memory();
    }
    buckets = fresh;
    n_buckets = n;
    for (size_t i = 0; i < n_old; i++) {
        for (Subscription *s = old[i], *next; s != NULL; s = next) {
            Subscription **bucket = bucket_of(s->object);
            next = s->next;
            s->next = *bucket;
            *bucket = s;
        }
    }
    PyMem_Free(old);
    return 0;
}

/* Whether CPython will tell of the next write to this object, which just held. */
static int
tells(CheckKind kind, Check *check)
{
    if (kind == CHECK_DICT) {
        /* The order of an OrderedDict changes silently, and on 3.13.0 values that live inside the instance. */
        return (mb_instance_watchers || !mb_dict_shares_values(check->object)) &&
               !(check->order != NULL && PyODict_Check(check->object) && PyTuple_GET_SIZE(check->order) > 1);
    }
    PyTypeObject *type = (PyTypeObject *)check->object;
    return mb_type_tag(type) != 0 || mb_assign_type_tag(type);
}

int
mb_subscribe(GuardProgram *p)
{
    int dicts = in_use && mb_dict_watchers ? p->watches[0].count : 0;
    int classes = in_use && mb_class_watchers ? p->watches[1].count : 0, done = 0;
    if (dicts + classes == 0) {
        return 0;
    }
    p->subscriptions = PyMem_Calloc((size_t)(dicts + classes), sizeof(Subscription));
    if (p->subscriptions == NULL) {
        return mb_no_memory();
    }
    if (make_room(n_subscriptions + (size_t)(dicts + classes)) < 0) {
        return -1;
    }
    for (int k = 0; k < 2; k++) {
        Watches *watches = &p->watches[k];
        int count = k == 0 ? dicts : classes;
        if (count == 0) {
            continue;
        }
        watches->stale = PyMem_Calloc((size_t)count, sizeof(int));
        watches->always = PyMem_Calloc((size_t)count, sizeof(int));
        watches->state = PyMem_Calloc((size_t)count, 1);
        if (watches->stale == NULL || watches->always == NULL || watches->state == NULL) {
            return mb_no_memory();
        }
        for (int i = count - 1; i >= 0; i--) {    /* the first is looked at first */
            PyObject *object = watches->tags[i].object;
            if ((k == 0 ? PyDict_Watch(dict_watcher, object) : PyType_Watch(class_watcher, object)) < 0) {
                return -1;
            }
            Subscription *s = &p->subscriptions[done++], **bucket = bucket_of(object);
            *s = (Subscription){object, p, watches, i, *bucket};
            *bucket = s;
            p->n_subscriptions = done;
            n_subscriptions++;
            mark_stale(watches, i);
        }
        watches->told = 1;
    }
    return 0;
}

void
mb_unsubscribe(GuardProgram *p)
{
    for (int i = 0; i < p->n_subscriptions; i++) {
        Subscription *gone = &p->subscriptions[i], **place = bucket_of(gone->object);
        int wanted = 0;
        while (*place != NULL) {
            if (*place == gone) {
                *place = gone->next;
                continue;
            }
            wanted |= (*place)->object == gone->object;
            place = &(*place)->next;
        }
        n_subscriptions--;
        if (!wanted) {
            PyObject *type, *value, *traceback;    /* this may run while an error is on its way */
            PyErr_Fetch(&type, &value, &traceback);
            if ((gone->watches == &p->watches[0] ? PyDict_Unwatch(dict_watcher, gone->object)
                                                 : PyType_Unwatch(class_watcher, gone->object)) < 0) {
                PyErr_Clear();
            }
            PyErr_Restore(type, value, traceback);
        }
    }
    p->n_subscriptions = 0;
    PyMem_Free(p->subscriptions);
    p->subscriptions = NULL;
    for (int k = 0; k < 2; k++) {
        Watches *watches = &p->watches[k];
        watches->n_stale = watches->n_always = watches->told = 0;
        PyMem_Free(watches->stale);
        PyMem_Free(watches->always);
        PyMem_Free(watches->state);
        watches->stale = watches->always = NULL;
        watches->state = NULL;
    }
}

/* Those of one kind that were written to, and those whose writes nobody tells of. A check may run a finaliser, and that
 * may write, or call the captured function: an object counts as settled only if nothing was written meanwhile. */
int
mb_sweep_told(GuardProgram *p, CheckKind kind)
{
    Watches *watches = &p->watches[kind - CHECK_DICT];
    int holds = 1;
    for (int i = 0; i < watches->n_always && holds == 1; i++) {
        holds = mb_run_watch(p, &p->checks[watches->checks[watches->always[i]]]);
    }
    while (watches->n_stale > 0 && holds == 1) {
        int index = watches->stale[watches->n_stale - 1];
        Check *check = &p->checks[watches->checks[index]];
        uint64_t marks = watches->marks;
        holds = mb_run_watch(p, check);
        if (holds == 1 && watches->marks == marks && watches->n_stale > 0 &&
            watches->stale[watches->n_stale - 1] == index) {
            watches->n_stale--;
            if (tells(kind, check)) {
                watches->state[index] = SETTLED;
            }
            else {
                watches->state[index] = ALWAYS;
                watches->always[watches->n_always++] = index;
            }
        }
    }
    return holds;
}

/* ---- which of them work here ---- */

int
mb_watchers_init(void)
{
    if (dict_watcher < 0 && (dict_watcher = PyDict_AddWatcher(on_dict_event)) < 0) {
        PyErr_Clear();    /* eight a process: others took them all */
    }
    if (class_watcher < 0 && (class_watcher = PyType_AddWatcher(on_class_event)) < 0) {
        PyErr_Clear();
    }
    return 0;
}

uint64_t
mb_watch_events(PyObject *Py_UNUSED(unused))
{
    return events;
}

/* Starts (or stops) counting writes to this dict or class; 0 where that cannot be done. For the self-tests. */
int
mb_watch_one(PyObject *object, int on)
{
    int is_class = PyType_Check(object), watcher = is_class ? class_watcher : dict_watcher;
    if (watcher < 0) {
        return 0;
    }
    int done = is_class ? (on ? PyType_Watch(watcher, object) : PyType_Unwatch(watcher, object))
                        : (on ? PyDict_Watch(watcher, object) : PyDict_Unwatch(watcher, object));
    if (done < 0) {
        PyErr_Clear();
    }
    return done == 0;
}

static PyObject *
use_watchers(PyObject *Py_UNUSED(module), PyObject *on)
{
    int before = in_use, wanted = PyObject_IsTrue(on);
    if (wanted < 0) {
        return NULL;
    }
    in_use = wanted;
    return PyBool_FromLong(before);
}

#else

int mb_subscribe(GuardProgram *p) { (void)p; return 0; }
void mb_unsubscribe(GuardProgram *p) { (void)p; }
int mb_sweep_told(GuardProgram *p, CheckKind kind) { (void)p, (void)kind; return 0; }
int mb_watchers_init(void) { return 0; }
uint64_t mb_watch_events(PyObject *unused) { (void)unused; return 0; }
int mb_watch_one(PyObject *object, int on) { (void)object, (void)on; return 0; }

static PyObject *
use_watchers(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(on))
{
    Py_RETURN_FALSE;
}

#endif

/* How many dicts and classes the next check compares, of those known from the start. */
int
mb_compared(GuardProgram *p)
{
    int n = 0;
    for (int k = 0; k < 2; k++) {
        n += p->watches[k].told ? p->watches[k].n_stale + p->watches[k].n_always : p->watches[k].count;
    }
    return n;
}

PyMethodDef mb_watcher_methods[] = {
    {"use_watchers", use_watchers, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};
