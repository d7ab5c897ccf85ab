/* What the C files of moebius.hook.native share. What they are to Python is said in native.pyi alone. */
#ifndef MOEBIUS_NATIVE_H
#define MOEBIUS_NATIVE_H

#include "cpython_private.h"

/* native.c */
extern PyObject *mb_absent;       /* native.ABSENT: "this key or attribute does not exist" */
extern int mb_disabled;           /* the global off switch */
int mb_guard_error(void);         /* after an error in a guard: Exceptions are cleared (0); others stay raised (-1) */
int mb_no_memory(void);           /* -1, with a MemoryError */
PyObject *mb_still_there(PyObject *weak);    /* a new reference to what a weak one is to, NULL if that is gone */

/* selftest.c */
extern int mb_dict_tags;          /* a dict's version tag changes with each write to it */
extern int mb_instance_tags;      /* the same for `instance.attribute = value` (false on 3.13.0) */
extern int mb_class_tags;         /* the same for classes and their bases */
extern int mb_dict_watchers, mb_instance_watchers, mb_class_watchers;    /* a watcher is told of each such write */
int mb_self_test(void);

/* values.c */
int mb_same_value(PyObject *a, PyObject *b);    /* identical, or constants of one type and one value: 1, 0 or -1 */
int mb_equal_value(PyObject *a, PyObject *b);   /* the same, and other objects by their own == */
PyObject *mb_order_iter(PyObject *dict);        /* an iterator over a dict's keys in their true order */

/* tensors.c */
typedef struct TensorMeta TensorMeta;
TensorMeta *mb_tensor_meta_new(PyObject *dict);
void mb_tensor_meta_free(TensorMeta *meta);
int mb_tensor_meta_traverse(TensorMeta *meta, visitproc visit, void *arg);
int mb_tensor_check(TensorMeta *meta, PyObject *object);    /* 1, 0 or -1 with an error */
int mb_tensors_init(PyObject *module);
void mb_tensor_prefetch(PyObject *object, const TensorMeta *meta, int near);    /* near: its turn comes soon */

/* tensors_fast.c */
extern PyMethodDef mb_tensor_methods[];
extern PyMethodDef mb_overlap_methods[];      /* overlaps.c */
const char *mb_tensor_reading(void);    /* "memory" or "attributes" */
Py_ssize_t mb_tensor_block(void);       /* words that one comparison takes, 0: field by field */

/* program.c builds, guards.c runs, watched.c its part that is known from the start, inspect.c explains and times */
typedef enum {
    SLOT_ARG, SLOT_CONST, SLOT_WEAK, SLOT_DICT_ITEM, SLOT_INSTANCE_DICT, SLOT_LIST_ITEM, SLOT_TUPLE_ITEM, SLOT_ATTR,
    SLOT_CELL, SLOT_TYPE, SLOT_PYTHON
} SlotKind;

typedef struct {
    SlotKind kind;
    int parent;             /* slot that this one starts from, or -1 */
    int *more;              /* python: the slots of its function's other arguments, or NULL */
    int n_more;
    Py_ssize_t index;       /* arg, list_item, tuple_item */
    PyObject *object;       /* const: the object; weak: a weak reference; dict_item: key; attr: name; python: function */
} Slot;

typedef enum {
    CHECK_IS, CHECK_IS_WEAK, CHECK_TYPE, CHECK_EQUAL, CHECK_LENGTH, CHECK_KEYS, CHECK_ABSENT, CHECK_CONTENTS,
    CHECK_TENSOR, CHECK_NONE_OF, CHECK_DISTINCT, CHECK_SAME, CHECK_ANSWERS, CHECK_PYTHON,
    /* of objects known from the start: */
    CHECK_DICT, CHECK_CLASS, CHECK_INSTANCE, CHECK_STATIC_TENSOR, CHECK_FUNCTION
} CheckKind;

typedef struct {
    CheckKind kind;
    int slot;               /* the slot it looks at, or -1 */
    int first_load, loads;  /* program->order[first_load : first_load + loads] are reached just before this check */
    Py_ssize_t length;
    PyObject *object;       /* expected object, type, value or key; the tensor; the function; what is watched */
    PyObject *expected;     /* keys/contents/none_of: tuple; answers: tuple of (callable, result); function: tuple;
                             * dict/class: {key: value}; instance: its __dict__ or NULL */
    PyObject *order;        /* dict: all keys or NULL; class: its MRO; instance: its class */
    int watch;              /* of an object known from the start: where it stands in the program's array of that kind */
    int *slots;             /* distinct, same, python */
    int n_slots;
    uintptr_t *addresses;   /* none_of: sorted, `length` of them */
    TensorMeta *meta;
} Check;

/* Checks on objects known from the start. Apart from the checks and side by side, so that one sweep
 * over thousands of them is fast. References are borrowed from the check. */
#define NO_TAG UINT64_MAX
#define N_WATCHED 5

typedef struct {
    PyObject *object;       /* dict or class */
    uint64_t tag;           /* version at which the check last held, or NO_TAG */
} TagWatch;

typedef struct {
    PyObject *object, *type;
    PyObject **where, *dict;    /* where the instance keeps its __dict__, and which one that must be */
} InstanceWatch;

typedef struct {
    PyObject *object;
    TensorMeta *meta;
} TensorWatch;

typedef struct {
    PyFunctionObject *function;
    PyObject *code, *defaults, *kwdefaults;    /* NULL: none */
} FunctionWatch;

typedef struct Subscription Subscription;
enum { SETTLED, STALE, ALWAYS };

typedef struct {
    int count;
    int *checks;            /* which check each one is */
    /* Dicts and classes on CPython >= 3.12, by watchers.c. told: these are in use, and the version tags not. */
    int told, n_stale, n_always;
    int *stale, *always;    /* to be looked at next: written to since; and each time: nobody tells of their writes */
    char *state;            /* SETTLED, STALE or ALWAYS, of each one */
    uint64_t marks;         /* how often one was marked stale */
    union {
        TagWatch *tags;
        InstanceWatch *instances;
        TensorWatch *tensors;
        FunctionWatch *functions;
    };
} Watches;

typedef struct {
    PyObject_HEAD
    Py_ssize_t n_positional;
    PyObject *kwnames;      /* tuple of str */
    Slot *slots;
    int n_slots;
    Check *checks;
    int n_checks;
    int *order;             /* slots in the order in which they are reached; the tail belongs to no check */
    int n_order, first_tail;
    Watches watches[N_WATCHED];    /* looked at first; by kind, from CHECK_DICT on */
    int *dynamic;           /* the other checks, by index, in order */
    int n_dynamic;
    PyObject **scratch;     /* slot values of the check that is running, if `busy` is not set */
    int busy;
    int cleared;            /* by the garbage collector: never holds again */
    Subscription *subscriptions;
    int n_subscriptions;
} GuardProgram;

extern PyTypeObject mb_GuardProgram_Type;
PyObject *mb_check_names(void);
extern PyMethodDef mb_program_methods[];
int mb_program_check(GuardProgram *p, PyObject *const *args, size_t nargsf, PyObject *kwnames);   /* 1, 0, -1 */
int mb_program_arity(GuardProgram *p, PyObject *const *args, size_t nargsf, PyObject *kwnames);
int mb_reach(GuardProgram *p, int slot, PyObject *const *args, PyObject **values);   /* 1, 0, -1 */
int mb_run_check(Check *check, PyObject **values);                                   /* 1, 0, -1 */
int mb_same_keys(PyObject *dict, PyObject *expected);    /* exactly these, in this order; 1, 0, -1 */
int mb_sweep(GuardProgram *p, CheckKind kind);      /* all of one kind of objects known from the start; 1, 0, -1 */
int mb_run_dynamic(GuardProgram *p, PyObject *const *args);                          /* 1, 0, -1 */
int mb_run_watch(GuardProgram *p, Check *check);    /* of an object known from the start; 1, 0, -1 */
int mb_by_address(const void *a, const void *b);    /* for qsort and bsearch of addresses */
int mb_watched(CheckKind kind);
void mb_release(GuardProgram *p, int first, int count, PyObject **values);

/* watchers.c */
extern PyMethodDef mb_watcher_methods[];
int mb_watchers_init(void);
int mb_subscribe(GuardProgram *p);      /* a built program: be told of writes to its dicts and classes. 0 or -1 */
void mb_unsubscribe(GuardProgram *p);
int mb_sweep_told(GuardProgram *p, CheckKind kind);     /* mb_sweep, where watches.told; 1, 0, -1 */
int mb_compared(GuardProgram *p);
uint64_t mb_watch_events(PyObject *unused);             /* how many writes were told of so far */
int mb_watch_one(PyObject *object, int on);             /* a dict or class, for the self-tests */

/* entry.c */
extern PyTypeObject mb_Entry_Type;
extern PyTypeObject mb_Continuation_Type;
PyObject *mb_finish(PyObject *module, PyObject *result);
PyObject *mb_leave_to(PyObject *module, PyObject *const *args, Py_ssize_t n);
PyObject *mb_leave_to_call(PyObject *module, PyObject *args);
PyObject *mb_call_timed(PyObject *module, PyObject *const *args, Py_ssize_t n, PyObject *kwnames);
PyObject *mb_call_with_cells(PyObject *module, PyObject *args);
PyObject *mb_set_own_tracer(PyObject *module, PyObject *tracer);
int mb_traced(void);
PyObject *mb_is_traced(PyObject *module, PyObject *unused);

/* frames.c */
extern int mb_hooked_threads;     /* how many threads have the hook switched on */
typedef struct {
    int was_on, base, popped;
} HookScope;
HookScope mb_hook_enter(int on);  /* for this thread, until the scope is left */
void mb_hook_leave(HookScope scope);
int mb_frames_init(PyObject *module);
extern PyMethodDef mb_frame_methods[];

#endif
