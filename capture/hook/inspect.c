/* A guard program asked from Python: does it hold, which check does not, what does each cost? */
#include "native.h"

#include <time.h>

typedef struct {
    PyObject **args;
    PyObject *kwnames;
    Py_ssize_t n_positional;
} Call;

static int
unpack_call(Call *call, PyObject *args, PyObject *kwargs)
{
    Py_ssize_t n = PyTuple_GET_SIZE(args), n_keywords = kwargs == NULL ? 0 : PyDict_GET_SIZE(kwargs);
    call->n_positional = n;
    call->kwnames = PyTuple_New(n_keywords);
    call->args = PyMem_New(PyObject *, (size_t)(n + n_keywords + 1));
    if (call->kwnames == NULL || call->args == NULL) {
        Py_XDECREF(call->kwnames);
        PyMem_Free(call->args);
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t i = 0; i < n; i++) {
        call->args[i] = Py_NewRef(PyTuple_GET_ITEM(args, i));
    }
    PyObject *key, *value;
    Py_ssize_t position = 0, i = 0;
    while (i < n_keywords && PyDict_Next(kwargs, &position, &key, &value)) {
        PyTuple_SET_ITEM(call->kwnames, i, Py_NewRef(key));
        call->args[n + i++] = Py_NewRef(value);
    }
    return 0;
}

static void
free_call(Call *call)
{
    for (Py_ssize_t i = 0; i < call->n_positional + PyTuple_GET_SIZE(call->kwnames); i++) {
        Py_DECREF(call->args[i]);
    }
    PyMem_Free(call->args);
    Py_DECREF(call->kwnames);
}

static int
parse_call(const char *format, PyObject *args, PyObject *kwargs, Call *call, Py_ssize_t *n)
{
    static char *names[] = {"args", "kwargs", "n", NULL};
    PyObject *call_args, *call_kwargs = NULL;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, format, names, &PyTuple_Type, &call_args, &call_kwargs, n)) {
        return -1;
    }
    if (call_kwargs == Py_None) {
        call_kwargs = NULL;
    }
    if (call_kwargs != NULL && !PyDict_Check(call_kwargs)) {
        PyErr_SetString(PyExc_TypeError, "kwargs must be a dict or None");
        return -1;
    }
    return unpack_call(call, call_args, call_kwargs);
}

static PyObject *
program_check_method(GuardProgram *p, PyObject *args, PyObject *kwargs)
{
    Call call;
    Py_ssize_t unused = 0;
    if (parse_call("O!|On:check", args, kwargs, &call, &unused) < 0) {
        return NULL;
    }
    int holds = mb_program_check(p, call.args, (size_t)call.n_positional, call.kwnames);
    free_call(&call);
    return holds < 0 ? NULL : PyBool_FromLong(holds);
}

/* Runs check i with its loads, in the order in which they were given. 1, 0, -1; *reached counts the slots that it owns. */
static int
step(GuardProgram *p, int i, PyObject *const *args, PyObject **values, int *reached)
{
    Check *check = &p->checks[i];
    if (mb_watched(check->kind)) {
        return mb_run_watch(p, check);
    }
    int holds = 1;
    for (int end = check->first_load + check->loads; *reached < end && holds == 1; (*reached)++) {
        holds = mb_reach(p, p->order[*reached], args, values);
    }
    return holds == 1 ? mb_run_check(check, values) : holds;
}

static PyObject *
program_explain(GuardProgram *p, PyObject *args, PyObject *kwargs)
{
    Call call;
    Py_ssize_t unused = 0;
    if (parse_call("O!|On:explain", args, kwargs, &call, &unused) < 0) {
        return NULL;
    }
    PyObject *result = NULL;
    PyObject **values = PyMem_Calloc((size_t)p->n_slots + 1, sizeof(PyObject *));
    int reached = 0, i = 0;
    int holds = values == NULL ? -1 : mb_program_arity(p, call.args, (size_t)call.n_positional, call.kwnames);
    if (values == NULL) {
        PyErr_NoMemory();
    }
    else if (holds == 0 || p->cleared) {
        result = PyLong_FromLong(-1);
        holds = -1;
    }
    for (; i < p->n_checks && holds == 1; i++) {
        holds = step(p, i, call.args, values, &reached);
        if (holds == 0) {
            result = PyLong_FromLong(i);
        }
    }
    for (; reached < p->n_order && holds == 1; reached++) {
        holds = mb_reach(p, p->order[reached], call.args, values);
        if (holds == 0) {
            result = PyLong_FromLong(p->n_checks);
        }
    }
    if (holds == 1) {
        result = Py_NewRef(Py_None);
    }
    if (values != NULL) {
        mb_release(p, 0, reached, values);
    }
    PyMem_Free(values);
    free_call(&call);
    return result;
}

/* Of this thread: what other programs do meanwhile does not count. */
static double
now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec * 1e9 + (double)t.tv_nsec;
}

static PyObject *
program_time(GuardProgram *p, PyObject *args, PyObject *kwargs)
{
    Call call;
    Py_ssize_t n = 1000;
    if (parse_call("O!|On:time", args, kwargs, &call, &n) < 0) {
        return NULL;
    }
    PyObject *result = PyList_New(0);
    PyObject **values = PyMem_Calloc((size_t)p->n_slots + 1, sizeof(PyObject *));
    int reached = 0;
    if (values == NULL) {
        PyErr_NoMemory();
        Py_CLEAR(result);
    }
    else if (n < 1) {
        PyErr_SetString(PyExc_ValueError, "n must be at least 1");
        Py_CLEAR(result);
    }
    else if (p->cleared || !mb_program_arity(p, call.args, (size_t)call.n_positional, call.kwnames)) {
        if (!PyErr_Occurred()) {
            PyErr_SetString(PyExc_ValueError, "these arguments do not have the shape that the program is for");
        }
        Py_CLEAR(result);
    }
    for (int i = 0; result != NULL && i < p->n_checks; i++) {
        Check *check = &p->checks[i];
        int watched = mb_watched(check->kind), holds = 1;
        double start = now_ns();
        for (Py_ssize_t k = 0; k < n && holds == 1; k++) {
            if (watched) {
                holds = mb_run_watch(p, check);
                continue;
            }
            mb_release(p, check->first_load, reached - check->first_load, values);
            reached = check->first_load;
            for (int end = reached + check->loads; reached < end && holds == 1; reached++) {
                holds = mb_reach(p, p->order[reached], call.args, values);
            }
            if (holds == 1) {
                holds = mb_run_check(check, values);
            }
        }
        double spent = now_ns() - start;
        PyObject *each = NULL;
        if (holds == 0) {
            PyErr_Format(PyExc_ValueError, "check %d does not hold for these arguments", i);
        }
        else if (holds == 1) {
            each = PyFloat_FromDouble(spent / (double)n);
        }
        if (each == NULL || PyList_Append(result, each) < 0) {
            Py_CLEAR(result);
        }
        Py_XDECREF(each);
    }
    if (values != NULL) {
        mb_release(p, 0, reached, values);
    }
    PyMem_Free(values);
    free_call(&call);
    return result;
}

PyMethodDef mb_program_methods[] = {
    {"check", (PyCFunction)(void (*)(void))program_check_method, METH_VARARGS | METH_KEYWORDS,
     "check(args, kwargs=None) -> bool: whether all guards hold for a call with these arguments."},
    {"explain", (PyCFunction)(void (*)(void))program_explain, METH_VARARGS | METH_KEYWORDS,
     "explain(args, kwargs=None) -> int | None: index of the first check that fails; -1: another number or other names "
     "of arguments; len(checks): a slot that no check uses cannot be reached; None: all hold."},
    {"time", (PyCFunction)(void (*)(void))program_time, METH_VARARGS | METH_KEYWORDS,
     "time(args, kwargs=None, n=1000) -> list of float: nanoseconds of each check, with the reaching of slots that it is "
     "the first to need, as the mean over n runs. ValueError if the guards do not hold for these arguments."},
    {NULL, NULL, 0, NULL},
};
