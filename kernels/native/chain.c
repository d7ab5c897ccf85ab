#define _GNU_SOURCE
#include "chain.h"

#include <dlfcn.h>
#include <math.h>
#include <stdint.h>

#include "asked.h"
#include "elements.h"
#include "threads.h"

#define BLOCK 1024      /* elements: 4 KiB of each tensor */
#define TEMPORARIES 4
#define REGISTERS 16    /* tensors and temporaries */
#define NUMBERS 256

/* As elements.h's CLONED, but that every clone with wide vectors has the fused product and sum. */
#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#define CLONED_FUSED __attribute__((target_clones("avx512f", "arch=haswell", "default")))
#else
#define CLONED_FUSED
#endif

/* The numbers that kernels/chains.py gives them. s: the step's number. */
typedef enum {
    ADD,        /* a + s b, of which the product may be rounded or not */
    ADD_NUMBER, /* a + s */
    MUL,
    MUL_NUMBER,
    DIV,
    DIV_NUMBER,
    SQRT,
    LERP,       /* a + s (b - a), from b's side where |s| >= 1/2 */
    ADDCMUL,    /* a + (s b) c */
    ADDCDIV,    /* a + (s b) / c */
    OPERATORS
} Operator;

/* out, a, b, c: registers, the tensors first. number: its place, unused where the operator has none. way: 0, or 1 for a sum
   of an unrounded product, and for the root that torch's MKL computes, which is not always the nearest number. */
typedef struct {
    int32_t operator, out, a, b, c, number, way;
} Step;

/* MKL's vmsSqrt, with which torch computes roots of contiguous float32 where it was built with MKL; NULL elsewhere. Its
   mode is torch's: high accuracy, small numbers kept, no errors (aten/src/ATen/cpu/vml.h). */
static void (*mkl_sqrt)(int, const float *, float *, long long);
#define MKL_MODE (0x2 | 0x140000 | 0x100)

int chain_find(void)
{
    void *torch = dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD);
    if (torch != NULL)
        *(void **)&mkl_sqrt = dlsym(torch, "vmsSqrt");
    return mkl_sqrt != NULL;
}

typedef struct {
    const Step *steps;
    const int64_t *tensors;
    const double *numbers;
    long step_count, tensor_count;
} Chain;

/* Operands may be the same memory, or none of it. */
#define EACH(EXPRESSION)            \
    do {                            \
        _Pragma("GCC ivdep")        \
        for (int i = 0; i < n; i++) \
            out[i] = (EXPRESSION);  \
    } while (0)
#define SUM(PRODUCT_A, PRODUCT_B, TERM)                    \
    do {                                                   \
        if (way)                                         \
            EACH(fmaf(PRODUCT_A, PRODUCT_B, TERM));        \
        else                                               \
            EACH((TERM) + (PRODUCT_A) * (PRODUCT_B));      \
    } while (0)

CLONED_FUSED static void run_step(Operator operator, int way, float s, float *out, const float *a, const float *b,
                                  const float *c, int n)
{
    float from_end = s - 1;
    switch (operator) {
    case ADD: SUM(s, b[i], a[i]); break;
    case ADD_NUMBER: EACH(a[i] + s); break;
    case MUL: EACH(a[i] * b[i]); break;
    case MUL_NUMBER: EACH(a[i] * s); break;
    case DIV: EACH(a[i] / b[i]); break;
    case DIV_NUMBER: EACH(a[i] / s); break;
    case SQRT:
        if (way)
            mkl_sqrt(n, a, out, MKL_MODE);
        else
            EACH(sqrtf(a[i]));
        break;
    case LERP:
        if (fabsf(s) < 0.5f)
            SUM(s, b[i] - a[i], a[i]);
        else
            SUM(from_end, b[i] - a[i], b[i]);
        break;
    case ADDCMUL: SUM(s * b[i], c[i], a[i]); break;
    case ADDCDIV: EACH(a[i] + s * b[i] / c[i]); break;
    default: break;
    }
}

static void run_range(const void *argument, long low, long high)
{
    const Chain *chain = argument;
    float temporaries[TEMPORARIES][BLOCK], *registers[REGISTERS];
    for (long at = low; at < high; at += BLOCK) {
        int n = (int)(high - at < BLOCK ? high - at : BLOCK);
        for (long r = 0; r < REGISTERS; r++) {
            long temporary = r - chain->tensor_count;
            registers[r] = temporary < 0             ? (float *)(intptr_t)chain->tensors[r] + at
                           : temporary < TEMPORARIES ? temporaries[temporary]
                                                     : NULL;
        }
        for (const Step *step = chain->steps; step < chain->steps + chain->step_count; step++)
            run_step((Operator)step->operator, step->way, (float)chain->numbers[step->number], registers[step->out],
                     registers[step->a], registers[step->b], registers[step->c], n);
    }
}

/* ---- from Python's tensors and numbers --------------------------------------------------------------------------- */

/* In the order of chains.py's KINDS: what a tensor that is read here has, and one more class of numbers. */
typedef enum { A_TENSOR, A_PARAMETER, IN_FLOAT32, IS_STRIDED, A_NUMPY_FLOAT, KINDS } Kind;

/* 1 where a tensor is read as it lies in memory; 0 where not, -1 for an error. */
static int is_plain(PyObject *tensor, PyObject *const *kinds)
{
    const struct {
        Asked name;
        PyObject *wanted;
    } wanted[] = {{DTYPE, kinds[IN_FLOAT32]},   {IS_CPU, Py_True},  {LAYOUT, kinds[IS_STRIDED]},
                  {IS_CONTIGUOUS, Py_True}, {IS_NEG, Py_False}, {IS_INFERENCE, Py_False}};
    int same = Py_TYPE(tensor) == (PyTypeObject *)kinds[A_TENSOR] || Py_TYPE(tensor) == (PyTypeObject *)kinds[A_PARAMETER];
    for (size_t i = 0; same == 1 && i < sizeof(wanted) / sizeof(wanted[0]); i++)
        same = asked_is(tensor, wanted[i].name, wanted[i].wanted);
    return same;
}

/* 1 where it is a number that rounds to float32 as torch rounds it; 0 where not. */
static int is_number(PyObject *value, PyObject *const *kinds, double *number)
{
    if (PyFloat_CheckExact(value) || Py_TYPE(value) == (PyTypeObject *)kinds[A_NUMPY_FLOAT]) {
        *number = PyFloat_AS_DOUBLE(value);
        return 1;
    }
    int beyond = 0;
    long long whole = PyLong_CheckExact(value) ? PyLong_AsLongLongAndOverflow(value, &beyond) : 0;
    *number = (double)whole;
    return PyLong_CheckExact(value) && !beyond && whole > -(1LL << 53) && whole < 1LL << 53;
}

/* Whether two of these pieces of memory overlap, without being the same. */
static int are_near(const int64_t *places, long count, int64_t size)
{
    for (long i = 0; i < count; i++)
        for (long k = 0; k < i; k++) {
            int64_t apart = places[i] - places[k];
            if (apart != 0 && apart < size && -apart < size)
                return 1;
        }
    return 0;
}

PyObject *chain(PyObject *module, PyObject *arguments)
{
    Py_buffer steps;
    PyObject *kinds, *inputs, *constants;
    int64_t places[REGISTERS], count = 0;
    double numbers[NUMBERS + 1];
    long tensor_count;
    int threads, does = 1;
    (void)module;
    if (!PyArg_ParseTuple(arguments, "y*lO!O!O!i", &steps, &tensor_count, &PyTuple_Type, &inputs, &PyTuple_Type,
                          &constants, &PyTuple_Type, &kinds, &threads))
        return NULL;
    Chain task = {(const Step *)steps.buf, places, numbers, (long)(steps.len / (Py_ssize_t)sizeof(Step)), tensor_count};
    long number_count = (long)PyTuple_GET_SIZE(constants), given = tensor_count;
    int wrong = tensor_count < 1 || tensor_count > REGISTERS - TEMPORARIES || number_count > NUMBERS ||
                tensor_count > PyTuple_GET_SIZE(inputs) || PyTuple_GET_SIZE(kinds) != KINDS;
    for (const Step *step = task.steps; step < task.steps + task.step_count; step++) {
        const int32_t used[] = {step->out, step->a, step->b, step->c};
        wrong |= step->operator< 0 || step->operator>= OPERATORS || step->number < 0 || step->number > number_count;
        for (int i = 0; i < 4; i++)
            wrong |= used[i] < 0 || used[i] >= tensor_count + TEMPORARIES;
        wrong |= step->operator== SQRT && step->way && mkl_sqrt == NULL;
    }
    if (wrong) {
        PyErr_Format(PyExc_IndexError, "a chain of %ld tensors and %ld numbers has a step outside of them",
                     tensor_count, number_count);
        does = -1;
    } else
        numbers[number_count] = 0; /* of steps without one */
    for (long i = 0; does == 1 && i < number_count; i++) {
        PyObject *number = PyTuple_GET_ITEM(constants, i);
        if (number == Py_None)
            number = given < PyTuple_GET_SIZE(inputs) ? PyTuple_GET_ITEM(inputs, given++) : Py_None;
        does = is_number(number, &PyTuple_GET_ITEM(kinds, 0), &numbers[i]);
    }
    for (long i = 0; does == 1 && i < tensor_count; i++) {
        PyObject *tensor = PyTuple_GET_ITEM(inputs, i);
        does = is_plain(tensor, &PyTuple_GET_ITEM(kinds, 0));
        if (does == 1) {
            int64_t size = asked_number(tensor, NUMEL);
            places[i] = asked_number(tensor, DATA_PTR);
            count = i ? count : size;
            does = PyErr_Occurred() ? -1 : size == count && places[i] != 0;
        }
    }
    does = does == 1 ? !are_near(places, tensor_count, 4 * count) : does;
    if (does == 1) {
        Py_BEGIN_ALLOW_THREADS
        threads_run(run_range, &task, (long)count, 32768, count < 32768 ? 1 : threads);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&steps);
    return does < 0 ? NULL : PyBool_FromLong(does);
}
