#define _GNU_SOURCE
#include "products.h"

#include <dlfcn.h>
#include <stdint.h>

#include "elements.h"

/* ---- torch's C interface ------------------------------------------------------------------------------------------ */

/* What AOTInductor's compiled models call, kept stable for them (torch/csrc/inductor/aoti_torch/c/shim.h): a tensor
   over memory that lies there, and torch's own product of such tensors, with whatever library torch has. Run with torch
   2.13; 2.11 has the same functions. Nothing is linked: they are looked up in the library that importing torch loaded. */
typedef void *Handle;
static int32_t (*make)(void *, int64_t, const int64_t *, const int64_t *, int64_t, int32_t, int32_t, int32_t, Handle *);
static int32_t (*delete)(Handle);
static int32_t (*mm_out)(Handle, Handle, Handle);
static int32_t (*addmm_out)(Handle, Handle, Handle, Handle, double, double);
static int32_t numbers[2], cpu;

int products_find(void)
{
    void *torch = dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD);
    if (torch == NULL)
        return 0;
    int32_t (*float32)(void) = (int32_t(*)(void))dlsym(torch, "aoti_torch_dtype_float32");
    int32_t (*bfloat16)(void) = (int32_t(*)(void))dlsym(torch, "aoti_torch_dtype_bfloat16");
    int32_t (*device)(void) = (int32_t(*)(void))dlsym(torch, "aoti_torch_device_type_cpu");
    *(void **)&make = dlsym(torch, "aoti_torch_create_tensor_from_blob");
    *(void **)&delete = dlsym(torch, "aoti_torch_delete_tensor_object");
    *(void **)&mm_out = dlsym(torch, "aoti_torch_cpu_mm_out");
    *(void **)&addmm_out = dlsym(torch, "aoti_torch_cpu_addmm_out");
    if (float32 == NULL || bfloat16 == NULL || device == NULL || make == NULL || delete == NULL || mm_out == NULL ||
        addmm_out == NULL)
        return 0;
    numbers[FLOAT32] = float32(), numbers[BFLOAT16] = bfloat16(), cpu = device();
    return 1;
}

static int view(const Matrix *matrix, Dtype dtype, Handle *handle)
{
    *handle = NULL;
    return make(matrix->address, 2, matrix->sizes, matrix->strides, 0, numbers[dtype], cpu, -1, handle) == 0;
}

int product(const Matrix *out, const Matrix *left, const Matrix *right, Dtype dtype, int add)
{
    Handle made[3] = {NULL, NULL, NULL};
    int done = view(out, dtype, &made[0]) && view(left, dtype, &made[1]) && view(right, dtype, &made[2]) &&
               (add ? addmm_out(made[0], made[0], made[1], made[2], 1.0, 1.0) : mm_out(made[0], made[1], made[2])) == 0;
    for (int i = 0; i < 3; i++)
        if (made[i] != NULL)
            delete(made[i]);
    return done;
}

int products_widen(void)
{
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
    __builtin_cpu_init();
    int amx = __builtin_cpu_supports("amx-bf16"), dots = __builtin_cpu_supports("avx512bf16");
    return !amx && !(dots && __builtin_cpu_is("amd"));
#else
    return 0;
#endif
}

/* ---- products of a panel's segments -------------------------------------------------------------------------------- */

/* A matrix of each segment: a panel's rows low..high, which stand along the axis `rows`; or, where that is -1, the
   expert's matrix, whose address is in the table (0: there is none, and the product is left out). */
typedef struct {
    Py_ssize_t address;
    int64_t sizes[2], strides[2];
    int rows;
} Operand;

static Matrix of_segment(const Operand *operand, const Segment *segment, Dtype dtype)
{
    Matrix matrix = {(char *)operand->address, {operand->sizes[0], operand->sizes[1]},
                     {operand->strides[0], operand->strides[1]}};
    if (operand->rows < 0)
        matrix.address = (char *)(intptr_t)((const int64_t *)operand->address)[segment->expert];
    else {
        matrix.sizes[operand->rows] = segment->high - segment->low;
        matrix.address += segment->low * operand->strides[operand->rows] * dtype_bytes(dtype);
    }
    return matrix;
}

typedef enum { NEVER, ALWAYS, LATER } Add; /* LATER: unless no earlier panel has this expert */

PyObject *products(PyObject *module, PyObject *arguments)
{
    Operand operands[3];
    Py_ssize_t segments;
    int count, dtype, add, done = 1;
    (void)module;
#define OPERAND(o) &(o).address, &(o).sizes[0], &(o).sizes[1], &(o).strides[0], &(o).strides[1], &(o).rows
    if (!PyArg_ParseTuple(arguments, "(nLLLLi)(nLLLLi)(nLLLLi)niii", OPERAND(operands[0]), OPERAND(operands[1]),
                          OPERAND(operands[2]), &segments, &count, &dtype, &add))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    for (int i = 0; i < count && done; i++) {
        const Segment *segment = (const Segment *)segments + i;
        Matrix matrices[3];
        int absent = 0;
        for (int o = 0; o < 3; o++) {
            matrices[o] = of_segment(&operands[o], segment, (Dtype)dtype);
            absent |= operands[o].rows < 0 && matrices[o].address == NULL;
        }
        done = absent || product(&matrices[0], &matrices[1], &matrices[2], (Dtype)dtype,
                                 add == ALWAYS || (add == LATER && !segment->first));
    }
    Py_END_ALLOW_THREADS
    if (!done) {
        const int64_t *left = operands[1].sizes, *right = operands[2].sizes, *out = operands[0].sizes;
        return PyErr_Format(PyExc_RuntimeError, "torch refused the product of an expert's rows, a part of [%lld, %lld] @ "
                            "[%lld, %lld] -> [%lld, %lld]", (long long)left[0], (long long)left[1], (long long)right[0],
                            (long long)right[1], (long long)out[0], (long long)out[1]);
    }
    Py_RETURN_NONE;
}
