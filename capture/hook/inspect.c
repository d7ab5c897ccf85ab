/* A guard program asked from Python: does it hold, which check does not, what does each cost? */
#include "native.h"

#include <math.h>
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
        return mb_no_memory();
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

enum { BATCHES = 5 };    /* the quickest of them counts: what comes in between only ever adds */

/* Nanoseconds of one of `n` runs of a check with what it is the first to reach; < 0 with an error. */
static double
time_check(GuardProgram *p, int index, Call *call, PyObject **values, int *reached, Py_ssize_t n)
{
    Check *check = &p->checks[index];
    int holds = 1;
    double best = HUGE_VAL;
    for (int batch = 0; batch < BATCHES && holds == 1; batch++) {
        double start = now_ns();
        for (Py_ssize_t k = 0; k < n && holds == 1; k++) {
            if (!mb_watched(check->kind)) {
                mb_release(p, check->first_load, *reached - check->first_load, values);
                *reached = check->first_load;
            }
            holds = step(p, index, call->args, values, reached);
        }
        best = Py_MIN(best, now_ns() - start);
    }
    if (holds == 0) {
        PyErr_Format(PyExc_ValueError, "check %d does not hold for these arguments", index);
    }
    return holds == 1 ? best / (double)n : -1.0;
}

/* Part of a call's checks: one kind of objects known from the start, or (N_WATCHED) what is reached from the arguments, or
 * (ALL_PARTS) all of it. */
enum { ALL_PARTS = N_WATCHED + 1 };

static double
time_part(GuardProgram *p, int part, Call *call, Py_ssize_t n)
{
    double best = HUGE_VAL;
    int holds = 1;
    for (int batch = 0; batch < BATCHES && holds == 1; batch++) {
        double start = now_ns();
        for (Py_ssize_t k = 0; k < n && holds == 1; k++) {
            holds = part < N_WATCHED    ? mb_sweep(p, CHECK_DICT + part)
                    : part == ALL_PARTS ? mb_program_check(p, call->args, (size_t)call->n_positional, call->kwnames)
                                        : mb_run_dynamic(p, call->args);
        }
        best = Py_MIN(best, now_ns() - start);
    }
    if (holds == 0) {
        PyErr_SetString(PyExc_ValueError, "the checks do not hold for these arguments");
    }
    return holds == 1 ? best / (double)n : -1.0;
}

static int
can_time(GuardProgram *p, Call *call, Py_ssize_t n)
{
    if (n < 1) {
        PyErr_SetString(PyExc_ValueError, "n must be at least 1");
        return 0;
    }
    if (p->cleared || !mb_program_arity(p, call->args, (size_t)call->n_positional, call->kwnames)) {
        if (!PyErr_Occurred()) {
            PyErr_SetString(PyExc_ValueError, "these arguments do not have the shape that the program is for");
        }
        return 0;
    }
    return 1;
}

/* A part runs faster than its checks one by one, each of which has to be told apart first. So the parts are measured as they
 * run in a call, and shared out in proportion to what each check takes by itself. */
static int
share_out(GuardProgram *p, Call *call, double *costs, Py_ssize_t n)
{
    double sums[N_WATCHED + 1] = {0.0}, parts[N_WATCHED + 1];
    for (int i = 0; i < p->n_checks; i++) {
        sums[mb_watched(p->checks[i].kind) ? p->checks[i].kind - CHECK_DICT : N_WATCHED] += costs[i];
    }
    for (int part = 0; part <= N_WATCHED; part++) {
        parts[part] = sums[part] > 0.0 ? time_part(p, part, call, n) : 0.0;
        if (parts[part] < 0.0) {
            return -1;
        }
    }
    for (int i = 0; i < p->n_checks; i++) {
        int part = mb_watched(p->checks[i].kind) ? p->checks[i].kind - CHECK_DICT : N_WATCHED;
        costs[i] *= sums[part] > 0.0 ? parts[part] / sums[part] : 0.0;
    }
    return 0;
}

static PyObject *
program_time(GuardProgram *p, PyObject *args, PyObject *kwargs)
{
    Call call;
    Py_ssize_t n = 1000;
    if (parse_call("O!|On:time", args, kwargs, &call, &n) < 0) {
        return NULL;
    }
    PyObject *result = NULL;
    PyObject **values = PyMem_Calloc((size_t)p->n_slots + 1, sizeof(PyObject *));
    double *costs = PyMem_Calloc((size_t)p->n_checks + 1, sizeof(double));
    int reached = 0, fine = values != NULL && costs != NULL;
    if (!fine) {
        PyErr_NoMemory();
    }
    fine = fine && can_time(p, &call, n);
    for (int i = 0; fine && i < p->n_checks; i++) {
        costs[i] = time_check(p, i, &call, values, &reached, n);
        fine = costs[i] >= 0.0;
    }
    if (values != NULL) {
        mb_release(p, 0, reached, values);
    }
    if (fine && share_out(p, &call, costs, n) == 0) {
        result = PyList_New(p->n_checks);
    }
    for (int i = 0; result != NULL && i < p->n_checks; i++) {
        PyObject *cost = PyFloat_FromDouble(costs[i]);
        if (cost == NULL) {
            Py_CLEAR(result);
            break;
        }
        PyList_SET_ITEM(result, i, cost);
    }
    PyMem_Free(values);
    PyMem_Free(costs);
    free_call(&call);
    return result;
}

static PyObject *
program_time_call(GuardProgram *p, PyObject *args, PyObject *kwargs)
{
    Call call;
    Py_ssize_t n = 1000;
    if (parse_call("O!|On:time_call", args, kwargs, &call, &n) < 0) {
        return NULL;
    }
    double cost = can_time(p, &call, n) ? time_part(p, ALL_PARTS, &call, n) : -1.0;
    free_call(&call);
    return cost < 0.0 ? NULL : PyFloat_FromDouble(cost);
}

PyMethodDef mb_program_methods[] = {
    {"check", (PyCFunction)(void (*)(void))program_check_method, METH_VARARGS | METH_KEYWORDS, NULL},
    {"explain", (PyCFunction)(void (*)(void))program_explain, METH_VARARGS | METH_KEYWORDS, NULL},
    {"time", (PyCFunction)(void (*)(void))program_time, METH_VARARGS | METH_KEYWORDS, NULL},
    {"time_call", (PyCFunction)(void (*)(void))program_time_call, METH_VARARGS | METH_KEYWORDS, NULL},
    {NULL, NULL, 0, NULL},
};
