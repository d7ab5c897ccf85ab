#define _GNU_SOURCE
#include "products.h"

#include <dlfcn.h>
#include <stdint.h>
#include <time.h>

#include "elements.h"
#include "threads.h"
#include "wide.h"

/* ---- torch's C interface ------------------------------------------------------------------------------------------ */

/* What AOTInductor's compiled models call, kept stable for them (torch/csrc/inductor/aoti_torch/c/shim.h): a tensor
   over memory that lies there, and torch's own product of such tensors, with whatever library torch has. Run with torch
   2.13; 2.11 has the same functions. Nothing is linked: they are looked up in the library that importing torch loaded. */
typedef void *Handle;
static int32_t (*make)(void *, int64_t, const int64_t *, const int64_t *, int64_t, int32_t, int32_t, int32_t, Handle *);
static int32_t (*delete)(Handle);
static int32_t (*mm_out)(Handle, Handle, Handle);
static int32_t (*addmm_out)(Handle, Handle, Handle, Handle, double, double);
static int32_t numbers[4], cpu;
static _Atomic long long made[4], own; /* products of each dtype; of all, those of gemm() */

int products_find(void)
{
    void *torch = dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD);
    if (torch == NULL)
        return 0;
    int32_t (*float32)(void) = (int32_t(*)(void))dlsym(torch, "aoti_torch_dtype_float32");
    int32_t (*bfloat16)(void) = (int32_t(*)(void))dlsym(torch, "aoti_torch_dtype_bfloat16");
    int32_t (*float16)(void) = (int32_t(*)(void))dlsym(torch, "aoti_torch_dtype_float16");
    int32_t (*float64)(void) = (int32_t(*)(void))dlsym(torch, "aoti_torch_dtype_float64");
    int32_t (*device)(void) = (int32_t(*)(void))dlsym(torch, "aoti_torch_device_type_cpu");
    *(void **)&make = dlsym(torch, "aoti_torch_create_tensor_from_blob");
    *(void **)&delete = dlsym(torch, "aoti_torch_delete_tensor_object");
    *(void **)&mm_out = dlsym(torch, "aoti_torch_cpu_mm_out");
    *(void **)&addmm_out = dlsym(torch, "aoti_torch_cpu_addmm_out");
    if (float32 == NULL || bfloat16 == NULL || float16 == NULL || float64 == NULL || device == NULL || make == NULL ||
        delete == NULL || mm_out == NULL || addmm_out == NULL)
        return 0;
    numbers[FLOAT32] = float32(), numbers[BFLOAT16] = bfloat16(), numbers[FLOAT16] = float16();
    numbers[FLOAT64] = float64(), cpu = device();
    return 1;
}

static int view(const Matrix *matrix, Dtype dtype, Handle *handle)
{
    *handle = NULL;
    return make(matrix->address, 2, matrix->sizes, matrix->strides, 0, numbers[dtype], cpu, -1, handle) == 0;
}

int product(const Matrix *out, const Matrix *left, const Matrix *right, Dtype dtype, int add, int threads)
{
    if (dtype == FLOAT32 && threads == 1 && gemm(out, left, right, add)) {
        made[dtype]++;
        own++;
        return 1;
    }
    Handle views[3] = {NULL, NULL, NULL};
    int done = view(out, dtype, &views[0]) && view(left, dtype, &views[1]) && view(right, dtype, &views[2]) &&
               (add ? addmm_out(views[0], views[0], views[1], views[2], 1.0, 1.0)
                    : mm_out(views[0], views[1], views[2])) == 0;
    for (int i = 0; i < 3; i++)
        if (views[i] != NULL)
            delete(views[i]);
    made[dtype] += done;
    return done;
}

PyObject *products_made(PyObject *module, PyObject *nothing)
{
    (void)module, (void)nothing;
    return Py_BuildValue("(LLLL)", made[FLOAT32], made[BFLOAT16], made[FLOAT16], made[FLOAT64]);
}

PyObject *gemm_products(PyObject *module, PyObject *nothing)
{
    (void)module, (void)nothing;
    return PyLong_FromLongLong(own);
}

PyObject *use_gemm(PyObject *module, PyObject *use)
{
    (void)module;
    return PyBool_FromLong(gemm_use(PyObject_IsTrue(use)));
}

/* ---- how long they take ---------------------------------------------------------------------------------------------- */

typedef struct {
    Matrix matrices[3];
    Dtype dtype;
    double *seconds; /* negative where torch refused */
} Trial;

static double thread_seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* The first range's thread; within a pool's work torch starts no threads, which other load would hold up. */
static void run_trial(const void *argument, long low, long high)
{
    const Trial *trial = argument;
    (void)high;
    if (low > 0)
        return;
    double start = thread_seconds();
    int done = product(&trial->matrices[0], &trial->matrices[1], &trial->matrices[2], trial->dtype, 0, 1);
    *trial->seconds = done ? thread_seconds() - start : -1;
}

PyObject *time_product(PyObject *module, PyObject *arguments)
{
    long size;
    int dtype, threads;
    double seconds = -1;
    (void)module;
    if (!PyArg_ParseTuple(arguments, "lii", &size, &dtype, &threads))
        return NULL;
    long bytes = size * size * dtype_bytes((Dtype)dtype);
    char *room = PyMem_RawCalloc(3, (size_t)bytes);
    if (room == NULL)
        return PyErr_NoMemory();
    Trial trial = {.dtype = (Dtype)dtype, .seconds = &seconds};
    for (int i = 0; i < 3; i++)
        trial.matrices[i] = (Matrix){room + i * bytes, {size, size}, {size, 1}};
    Py_BEGIN_ALLOW_THREADS
    threads_run(run_trial, &trial, 2, 1, threads);
    Py_END_ALLOW_THREADS
    PyMem_RawFree(room);
    if (seconds < 0)
        return PyErr_Format(PyExc_RuntimeError, "torch refused the product of two matrices [%ld, %ld]", size, size);
    return PyFloat_FromDouble(seconds);
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

typedef struct {
    Operand operands[3]; /* out, left, right */
    const Segment *segments;
    int count, add, wide, threads;
    Dtype dtype;
} Task;

/* The matrices of a segment; 0 where one of them is not there. */
static int find_matrices(const Task *task, const Segment *segment, Matrix *matrices)
{
    int found = 1;
    for (int o = 0; o < 3; o++) {
        matrices[o] = of_segment(&task->operands[o], segment, task->dtype);
        found &= task->operands[o].rows >= 0 || matrices[o].address != NULL;
    }
    return found;
}

static int is_wide(const Task *task, const Segment *segment)
{
    return (task->dtype == BFLOAT16 || task->dtype == FLOAT16) && segment->high - segment->low >= task->wide;
}

/* The numbers of room that the segment with the most needs. */
static int64_t room_for(const Task *task)
{
    Matrix matrices[3];
    int64_t most = 0;
    for (int i = 0; i < task->count; i++)
        if (is_wide(task, task->segments + i) && find_matrices(task, task->segments + i, matrices)) {
            int64_t numbers = wide_room(&matrices[1], &matrices[2], task->threads);
            most = numbers > most ? numbers : most;
        }
    return most;
}

/* 0 where torch refuses. */
static int multiply(const Task *task, float *room)
{
    Matrix matrices[3];
    int done = 1;
    for (const Segment *segment = task->segments; done && segment < task->segments + task->count; segment++) {
        if (!find_matrices(task, segment, matrices))
            continue;
        int add = task->add == ALWAYS || (task->add == LATER && !segment->first);
        done = is_wide(task, segment)
                   ? wide_product(&matrices[0], &matrices[1], &matrices[2], task->dtype, add, room, task->threads)
                   : product(&matrices[0], &matrices[1], &matrices[2], task->dtype, add, task->threads);
    }
    return done;
}

PyObject *products(PyObject *module, PyObject *arguments)
{
    Task task;
    Py_ssize_t segments;
    int dtype, done;
    (void)module;
#define OPERAND(o) &(o).address, &(o).sizes[0], &(o).sizes[1], &(o).strides[0], &(o).strides[1], &(o).rows
    if (!PyArg_ParseTuple(arguments, "(nLLLLi)(nLLLLi)(nLLLLi)niiiii", OPERAND(task.operands[0]),
                          OPERAND(task.operands[1]), OPERAND(task.operands[2]), &segments, &task.count, &dtype, &task.add,
                          &task.wide, &task.threads))
        return NULL;
    task.segments = (const Segment *)segments, task.dtype = (Dtype)dtype;
    int64_t numbers = room_for(&task);
    float *room = numbers ? PyMem_RawMalloc((size_t)numbers * sizeof *room) : NULL;
    if (numbers && room == NULL)
        return PyErr_NoMemory();
    Py_BEGIN_ALLOW_THREADS
    done = multiply(&task, room);
    Py_END_ALLOW_THREADS
    PyMem_RawFree(room);
    if (!done) {
        const int64_t *left = task.operands[1].sizes, *right = task.operands[2].sizes, *out = task.operands[0].sizes;
        return PyErr_Format(PyExc_RuntimeError, "torch refused the product of an expert's rows, a part of [%lld, %lld] @ "
                            "[%lld, %lld] -> [%lld, %lld]", (long long)left[0], (long long)left[1], (long long)right[0],
                            (long long)right[1], (long long)out[0], (long long)out[1]);
    }
    Py_RETURN_NONE;
}
