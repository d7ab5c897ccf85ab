#define _GNU_SOURCE
#include "chain.h"

#include <dlfcn.h>
#include <math.h>
#include <stdint.h>

#include "elements.h"
#include "threads.h"

#define BLOCK 1024      /* elements: 4 KiB of each tensor */
#define TEMPORARIES 4
#define REGISTERS 16    /* tensors and temporaries */

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

PyObject *chain(PyObject *module, PyObject *arguments)
{
    Chain task;
    Py_ssize_t steps, tensors, numbers;
    const char *of_steps, *of_tensors, *of_numbers;
    long count;
    int threads;
    (void)module;
    if (!PyArg_ParseTuple(arguments, "y#y#y#li", &of_steps, &steps, &of_tensors, &tensors, &of_numbers, &numbers, &count,
                          &threads))
        return NULL;
    task.steps = (const Step *)of_steps, task.step_count = (long)(steps / (Py_ssize_t)sizeof(Step));
    task.tensors = (const int64_t *)of_tensors, task.tensor_count = (long)(tensors / (Py_ssize_t)sizeof(int64_t));
    task.numbers = (const double *)of_numbers;
    long number_count = (long)(numbers / (Py_ssize_t)sizeof(double));
    long known = task.tensor_count + TEMPORARIES < REGISTERS ? task.tensor_count + TEMPORARIES : REGISTERS;
    for (const Step *step = task.steps; step < task.steps + task.step_count; step++) {
        const int32_t used[] = {step->out, step->a, step->b, step->c};
        int wrong = step->operator< 0 || step->operator>= OPERATORS || step->number < 0 || step->number >= number_count;
        for (int i = 0; i < 4; i++)
            wrong |= used[i] < 0 || used[i] >= known;
        wrong |= step->operator== SQRT && step->way && mkl_sqrt == NULL;
        if (wrong || task.tensor_count > REGISTERS - TEMPORARIES)
            return PyErr_Format(PyExc_IndexError, "a chain of %ld tensors and %ld numbers has a step outside of them",
                                task.tensor_count, number_count);
    }
    Py_BEGIN_ALLOW_THREADS
    threads_run(run_range, &task, count, 32768, count < 32768 ? 1 : threads);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}
