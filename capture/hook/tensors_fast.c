/* Reading tensors in memory: 10 to 20 ns a tensor, where attributes cost 500.
 *
 * Where a Python tensor keeps its TensorImpl, and where that keeps its dispatch key set and autograd state, differs between
 * versions of torch. Nothing here knows an offset: `calibrate_tensors` looks for known values in known tensors and refuses
 * when it finds none or more than one place. Sizes, strides, dtype and device come from torch's C shims, found by name in
 * the library that torch has loaded already.
 *
 * A fast answer is only ever "it reads like one that passed"; anything else is left to the attributes. */
#include "tensors.h"

#include <dlfcn.h>
#include <malloc.h>
#include <string.h>

typedef int32_t (*ReadInt64)(void *tensor, int64_t *out);
typedef int32_t (*ReadInt32)(void *tensor, int32_t *out);
typedef int32_t (*ReadPointer)(void *tensor, int64_t **out);
typedef int32_t (*ReadAddress)(void *tensor, void **out);

static struct {
    ReadInt64 dim, storage_offset;
    ReadPointer sizes, strides;
    ReadInt32 dtype, device_index, layout;
    ReadAddress address;
} shim;

enum { MAX_TYPES = 4 };
static struct {
    int on;
    Py_ssize_t impl, key_set, autograd, requires_grad;    /* offsets in object, TensorImpl, TensorImpl, autograd state */
    Py_ssize_t block, block_words;                        /* sizes, strides, offset, dtype, key set, side by side; 0: no */
    int32_t strided;                                      /* layout code of ordinary tensors */
    PyTypeObject *types[MAX_TYPES];                       /* classes that the offsets were found in */
    int n_types;
} memory;

const char *
mb_tensor_reading(void)
{
    return memory.on ? "memory" : "attributes";
}

Py_ssize_t
mb_tensor_block(void)
{
    return memory.on ? memory.block_words : 0;
}

static int
is_known(PyObject *type)
{
    int known = 0;
    for (int i = 0; i < memory.n_types; i++) {
        known |= (PyObject *)memory.types[i] == type;
    }
    return known;
}

static inline void *
word_at(const void *base, Py_ssize_t offset)
{
    void *word;
    memcpy(&word, (const char *)base + offset, sizeof(word));
    return word;
}

static inline uint64_t
bits_at(const void *base, Py_ssize_t offset)
{
    uint64_t bits;
    memcpy(&bits, (const char *)base + offset, sizeof(bits));
    return bits;
}

/* ---- checking ---- */

static inline int
same_extents(const int64_t *actual, const int64_t *expected, Py_ssize_t n)
{
    for (Py_ssize_t i = 0; i < n; i++) {
        if (actual[i] != expected[i] && expected[i] != ANY) {
            return 0;
        }
    }
    return 1;
}

/* `expected` is 0 or 1. */
static inline int
same_requires_grad(PyObject *object, void *impl, int expected)
{
    void *autograd = word_at(impl, memory.autograd);
    if (autograd == NULL) {
        return !expected;
    }
    if (((const char *)autograd)[memory.requires_grad]) {
        return expected;
    }
    int same = mb_same_flag(object, REQUIRES_GRAD, expected);    /* it may still, as the result of something that does */
    if (same < 0) {
        PyErr_Clear();
    }
    return same == 1;
}

/* The whole stretch of memory at once, for tensors whose sizes do not vary. */
static inline int
same_block(const TensorMeta *meta, const void *impl)
{
    uint64_t differ = 0;
    for (Py_ssize_t i = 0; i < memory.block_words; i++) {
        differ |= bits_at(impl, memory.block + i * (Py_ssize_t)sizeof(uint64_t)) ^ meta->block[i];
    }
    return differ == 0;
}

static int
same_fields(const TensorMeta *meta, void *tensor)
{
    int32_t code, index;
    if (shim.dtype(tensor, &code) != 0 || code != meta->dtype_code || shim.device_index(tensor, &index) != 0 ||
        index != meta->device_index) {
        return 0;
    }
    if (meta->ndim >= 0) {
        int64_t dim, *extents;
        if (shim.dim(tensor, &dim) != 0 || dim != meta->ndim) {
            return 0;
        }
        if (meta->shape != NULL &&
            (shim.sizes(tensor, &extents) != 0 || !same_extents(extents, meta->shape, meta->ndim))) {
            return 0;
        }
        if (meta->stride != NULL &&
            (shim.strides(tensor, &extents) != 0 || !same_extents(extents, meta->stride, meta->ndim))) {
            return 0;
        }
    }
    int64_t offset;
    return meta->storage_offset == ANY ||
           (shim.storage_offset(tensor, &offset) == 0 && offset == meta->storage_offset);
}

void
mb_tensor_prefetch(PyObject *object, const TensorMeta *meta, int near)
{
    const char *what = near && memory.on ? word_at(object, memory.impl) : (const char *)object;
    __builtin_prefetch(what);
    __builtin_prefetch(what + 64);
    if (near) {
        __builtin_prefetch(what + 128);
    }
    else {
        __builtin_prefetch(meta);
        __builtin_prefetch((const char *)meta + 64);
        __builtin_prefetch((const char *)meta + 128);
        __builtin_prefetch((const char *)meta + 192);
    }
}

int
mb_fast_check(TensorMeta *meta, PyObject *object)
{
    void *impl = word_at(object, memory.impl);
    if (!memory.on || impl == NULL || bits_at(impl, memory.key_set) != meta->key_set) {
        return 0;
    }
    /* An at::Tensor is one pointer to its TensorImpl. */
    if (!(meta->has_block && same_block(meta, impl)) && !same_fields(meta, (char *)object + memory.impl)) {
        return 0;
    }
    return meta->flags[REQUIRES_GRAD] < 0 || same_requires_grad(object, impl, meta->flags[REQUIRES_GRAD]);
}

/* How many bytes from its first element to behind its last one; 0 where it has none, -1 where it cannot be read. */
static int64_t
reach_of(void *tensor, int64_t itemsize)
{
    int32_t layout;
    int64_t dim, *sizes, *strides, reach = 1;
    if (shim.layout(tensor, &layout) != 0 || layout != memory.strided || shim.dim(tensor, &dim) != 0 ||
        shim.sizes(tensor, &sizes) != 0 || shim.strides(tensor, &strides) != 0) {
        return -1;
    }
    for (int64_t i = 0; i < dim; i++) {
        if (sizes[i] == 0) {
            return 0;
        }
        reach += (sizes[i] - 1) * strides[i];
    }
    return reach * itemsize;
}

/* Where a tensor's elements lie: [begin, end); both 0 where it has none. reach: as above, if it is known; else minus the
 * bytes of an element. 0: it cannot be read. */
int
mb_tensor_span(PyObject *object, int64_t reach, uintptr_t *begin, uintptr_t *end)
{
    void *address, *tensor = (char *)object + memory.impl;
    if (!memory.on || !is_known((PyObject *)Py_TYPE(object)) || word_at(object, memory.impl) == NULL) {
        return 0;
    }
    if (reach < 0) {
        reach = reach_of(tensor, -reach);
    }
    if (reach < 0 || shim.address(tensor, &address) != 0) {
        return 0;
    }
    *begin = address == NULL || reach == 0 ? 0 : (uintptr_t)address;
    *end = *begin == 0 ? 0 : *begin + (uintptr_t)reach;
    return 1;
}

/* Whether the block says all that is guarded: nothing may vary, all of it lies inside (no more than five dimensions do),
 * and the device is the CPU, of which there is one. */
static int
block_suffices(const TensorMeta *meta, PyObject *object)
{
    if (memory.block_words == 0 || meta->ndim < 0 || meta->ndim > 5 || meta->shape == NULL) {
        return 0;
    }
    for (Py_ssize_t i = 0; i < meta->ndim; i++) {
        if (meta->shape[i] == ANY) {
            return 0;
        }
    }
    PyObject *device = PyObject_GetAttrString(object, "device");
    PyObject *type = device == NULL ? NULL : PyObject_GetAttrString(device, "type");
    int cpu = type != NULL && PyUnicode_Check(type) && PyUnicode_CompareWithASCIIString(type, "cpu") == 0;
    Py_XDECREF(device);
    Py_XDECREF(type);
    PyErr_Clear();
    return cpu;
}

void
mb_fast_record(TensorMeta *meta, PyObject *object)
{
    if (!memory.on) {
        return;    /* torch may be imported and calibrated later */
    }
    void *impl = is_known(meta->type) ? word_at(object, memory.impl) : NULL, *tensor = (char *)object + memory.impl;
    int32_t layout;
    if (impl == NULL || shim.layout(tensor, &layout) != 0 || layout != memory.strided ||
        shim.dtype(tensor, &meta->dtype_code) != 0 || shim.device_index(tensor, &meta->device_index) != 0) {
        meta->recorded = -1;
        return;
    }
    meta->key_set = bits_at(impl, memory.key_set);
    meta->has_block = 0;
    if (block_suffices(meta, object)) {
        memcpy(meta->block, (const char *)impl + memory.block, (size_t)memory.block_words * sizeof(uint64_t));
        meta->has_block = 1;
    }
    /* One that keeps changing what is not guarded (say, its device) is not worth a record each time. */
    meta->recorded = mb_fast_check(meta, object) && meta->failures++ < 8 ? 1 : -1;
}

/* ---- calibration ---- */

typedef struct {
    PyObject *tensor;
    void *impl;
    uint64_t key_set;
} Sample;

static int
load_shims(const char *library, const char **why)
{
    void *handle = dlopen(library, RTLD_LAZY | RTLD_NOLOAD);
    if (handle == NULL) {
        *why = "torch's library is not loaded, or is elsewhere";
        return 0;
    }
    struct {
        void *where;
        const char *name;
    } names[] = {
        {&shim.dim, "aoti_torch_get_dim"}, {&shim.storage_offset, "aoti_torch_get_storage_offset"},
        {&shim.sizes, "aoti_torch_get_sizes"}, {&shim.strides, "aoti_torch_get_strides"},
        {&shim.dtype, "aoti_torch_get_dtype"}, {&shim.device_index, "aoti_torch_get_device_index"},
        {&shim.layout, "aoti_torch_get_layout"}, {&shim.address, "aoti_torch_get_data_ptr"},
    };
    for (size_t i = 0; i < Py_ARRAY_LENGTH(names); i++) {
        void *symbol = dlsym(handle, names[i].name);
        if (symbol == NULL) {
            *why = "this torch lacks a C shim";
            return 0;
        }
        memcpy(names[i].where, &symbol, sizeof(symbol));
    }
    return 1;    /* the handle stays open: the functions are used from now on */
}

/* Whether every sample has at `offset` what it should: the object its TensorImpl ('m'), and that its key set ('k'), or the
 * words of its sizes ('s'), strides ('t') or storage offset ('o'). */
static int
stands_at(const Sample *samples, Py_ssize_t n, char what, Py_ssize_t offset)
{
    for (Py_ssize_t i = 0; i < n; i++) {
        if (what == 'm' || what == 'k') {
            if (what == 'm' ? word_at(samples[i].tensor, offset) != samples[i].impl
                            : bits_at(samples[i].impl, offset) != samples[i].key_set) {
                return 0;
            }
            continue;
        }
        void *tensor = (char *)samples[i].tensor + memory.impl;
        int64_t dim, value, *values = &value;
        if (shim.dim(tensor, &dim) != 0 || dim > 5) {
            continue;
        }
        if (what == 's' ? shim.sizes(tensor, &values) : what == 't' ? shim.strides(tensor, &values)
                                                                     : shim.storage_offset(tensor, &value)) {
            return 0;
        }
        dim = what == 'o' ? 1 : dim;
        if (memcmp((const char *)samples[i].impl + offset, values, (size_t)dim * sizeof(int64_t)) != 0) {
            return 0;
        }
    }
    return 1;
}

/* The one such offset of a word in [first, end); -1: none or several. */
static Py_ssize_t
find_offset(const Sample *samples, Py_ssize_t n, char what, Py_ssize_t first, Py_ssize_t end)
{
    Py_ssize_t found = -1;
    for (Py_ssize_t offset = first; offset + (Py_ssize_t)sizeof(uint64_t) <= end; offset += sizeof(uint64_t)) {
        if (stands_at(samples, n, what, offset)) {
            if (found >= 0) {
                return -1;
            }
            found = offset;
        }
    }
    return found;
}

/* Bytes that may be read behind a pointer that malloc gave. */
static Py_ssize_t
readable(void *pointer, Py_ssize_t most)
{
    Py_ssize_t size = (Py_ssize_t)malloc_usable_size(pointer);
    return size < most ? size : most;
}

static int
set_requires_grad(PyObject *tensor, int value)
{
    PyObject *result = PyObject_CallMethod(tensor, "requires_grad_", "O", value ? Py_True : Py_False);
    Py_XDECREF(result);
    return result == NULL ? -1 : 0;
}

/* Watches which word of the TensorImpl, and which byte behind it, follow requires_grad_(). -1: a Python error. */
static int
find_requires_grad(const Sample *sample, Py_ssize_t *autograd, Py_ssize_t *flag)
{
    enum { IMPL_BYTES = 512, STATE_BYTES = 512 };
    char before[IMPL_BYTES], on[STATE_BYTES], off[STATE_BYTES];
    *autograd = *flag = -1;
    Py_ssize_t size = readable(sample->impl, IMPL_BYTES) & ~(Py_ssize_t)7;
    memcpy(before, sample->impl, (size_t)size);
    if (set_requires_grad(sample->tensor, 1) < 0) {
        return -1;
    }
    for (Py_ssize_t offset = 0; offset < size; offset += sizeof(void *)) {
        if (word_at(before, offset) == word_at(sample->impl, offset)) {
            continue;
        }
        if (*autograd >= 0 || word_at(before, offset) != NULL) {
            *autograd = -1;
            return 0;
        }
        *autograd = offset;
    }
    if (*autograd < 0) {
        return 0;
    }
    void *state = word_at(sample->impl, *autograd);
    if ((uintptr_t)state < 4096 || (uintptr_t)state % sizeof(void *) != 0) {
        return 0;
    }
    size = readable(state, STATE_BYTES);
    memcpy(on, state, (size_t)size);
    if (set_requires_grad(sample->tensor, 0) < 0) {
        return -1;
    }
    if (word_at(sample->impl, *autograd) != state) {
        return 0;
    }
    memcpy(off, state, (size_t)size);
    for (Py_ssize_t offset = 0; offset < size; offset++) {
        if (on[offset] == off[offset]) {
            continue;
        }
        if (*flag >= 0 || on[offset] != 1 || off[offset] != 0) {
            *flag = -1;
            return 0;
        }
        *flag = offset;
    }
    return 0;
}

/* Tensors that differ in what the key set stands for have different key sets. 1, 0 or -1. */
static int
key_sets_tell_apart(const Sample *samples, Py_ssize_t n)
{
    for (Py_ssize_t i = 0; i < n; i++) {
        for (Py_ssize_t j = 0; j < i; j++) {
            if (samples[i].key_set != samples[j].key_set) {
                continue;
            }
            for (int flag = IS_CONJ; flag <= IS_INFERENCE; flag++) {
                int a = mb_same_flag(samples[i].tensor, flag, 1), b = mb_same_flag(samples[j].tensor, flag, 1);
                if (a < 0 || b < 0 || a != b) {
                    return a < 0 || b < 0 ? -1 : 0;
                }
            }
        }
    }
    return 1;
}

/* What the shims say is what the attributes say. 1, 0 or -1. */
static int
shims_agree(const Sample *sample)
{
    void *tensor = (char *)sample->tensor + memory.impl;
    int64_t dim, offset, *sizes, *strides;
    if (shim.dim(tensor, &dim) != 0 || shim.sizes(tensor, &sizes) != 0 || shim.strides(tensor, &strides) != 0 ||
        shim.storage_offset(tensor, &offset) != 0) {
        return 0;
    }
    int same = mb_same_sizes(PyObject_GetAttrString(sample->tensor, "shape"), (Py_ssize_t)dim, sizes);
    if (same == 1) {
        same = mb_same_sizes(PyObject_CallMethod(sample->tensor, "stride", NULL), (Py_ssize_t)dim, strides);
    }
    if (same == 1) {
        PyObject *value = PyObject_CallMethod(sample->tensor, "storage_offset", NULL);
        same = value == NULL ? -1 : PyLong_AsLongLong(value) == offset;
        Py_XDECREF(value);
    }
    return PyErr_Occurred() ? -1 : same;
}

/* Looks for one stretch of memory that holds everything that tensors differ in: the number of dimensions and the sizes, then
 * strides, storage offset and dtype, up to the key set. Finding none only costs speed. -1: a Python error. */
static int
find_block(const Sample *samples, Py_ssize_t n, const Sample *toggle)
{
    memory.block_words = 0;
    Py_ssize_t last = memory.key_set - 4 * (Py_ssize_t)sizeof(int64_t);    /* five words are read */
    Py_ssize_t sizes = find_offset(samples, n, 's', 0, last), strides = find_offset(samples, n, 't', 0, last);
    Py_ssize_t offset = find_offset(samples, n, 'o', 0, memory.key_set);
    Py_ssize_t start = sizes - (Py_ssize_t)sizeof(int64_t);    /* the number of dimensions stands before them */
    Py_ssize_t words = (memory.key_set - start) / (Py_ssize_t)sizeof(uint64_t) + 1;
    if (sizes < 8 || strides <= sizes || offset <= strides || offset >= memory.key_set || words > MAX_BLOCK) {
        return 0;
    }
    for (Py_ssize_t i = 0; i < n; i++) {
        int64_t dim;
        if (shim.dim((char *)samples[i].tensor + memory.impl, &dim) != 0 ||
            bits_at(samples[i].impl, start) != (uint64_t)dim) {
            return 0;
        }
    }
    /* The dtype: give a tensor data of another one and see whether the stretch changes. */
    uint64_t before[MAX_BLOCK];
    memcpy(before, (const char *)toggle->impl + start, (size_t)words * sizeof(uint64_t));
    PyObject *other = PyObject_CallMethod(toggle->tensor, "int", NULL);
    int failed = other == NULL || PyObject_SetAttrString(toggle->tensor, "data", other) < 0;
    Py_XDECREF(other);
    if (failed) {
        return -1;
    }
    if (word_at(toggle->tensor, memory.impl) != toggle->impl ||
        memcmp(before, (const char *)toggle->impl + start, (size_t)words * sizeof(uint64_t)) == 0) {
        return 0;
    }
    memory.block = start;
    memory.block_words = words;
    return 0;
}

/* 1: memory can be read; 0: *why says why not; -1: a Python error. */
static int
calibrate(const char *library, const Sample *samples, Py_ssize_t n, const Sample *toggles, Py_ssize_t n_toggles,
          const char **why)
{
    if (!load_shims(library, why)) {
        return 0;
    }
    *why = "too few samples";
    if (n < 2 || n_toggles < 2) {
        return 0;
    }
    Py_ssize_t object_end = PY_SSIZE_T_MAX, impl_end = 512;
    memory.n_types = 0;
    for (Py_ssize_t i = 0; i < n; i++) {
        PyTypeObject *type = Py_TYPE(samples[i].tensor);
        if (type->tp_basicsize < object_end) {
            object_end = type->tp_basicsize;
        }
        impl_end = readable(samples[i].impl, impl_end);
        if (!is_known((PyObject *)type) && memory.n_types < MAX_TYPES) {
            memory.types[memory.n_types++] = (PyTypeObject *)Py_NewRef(type);
        }
    }
    *why = "where a tensor keeps its TensorImpl is ambiguous";
    memory.impl = find_offset(samples, n, 'm', sizeof(PyObject), object_end);
    if (memory.impl < 0) {
        return 0;
    }
    *why = "where a TensorImpl keeps its key set is ambiguous";
    memory.key_set = find_offset(samples, n, 'k', 0, impl_end);
    if (memory.key_set < 0) {
        return 0;
    }
    *why = "where autograd keeps requires_grad is ambiguous";
    for (Py_ssize_t i = 0; i < n_toggles; i++) {
        Py_ssize_t autograd, flag;
        if (find_requires_grad(&toggles[i], &autograd, &flag) < 0) {
            return -1;
        }
        if (autograd < 0 || flag < 0 || (i > 0 && (autograd != memory.autograd || flag != memory.requires_grad))) {
            return 0;
        }
        memory.autograd = autograd;
        memory.requires_grad = flag;
    }
    *why = "key sets do not tell conjugate, negative and inference tensors apart";
    int good = key_sets_tell_apart(samples, n);
    *why = good == 1 ? "the C shims disagree with the attributes" : *why;
    for (Py_ssize_t i = 0; i < n && good == 1; i++) {
        good = shims_agree(&samples[i]);
    }
    if (good == 1 && shim.layout((char *)samples[0].tensor + memory.impl, &memory.strided) != 0) {
        good = 0;
    }
    return good == 1 && find_block(samples, n, &toggles[0]) < 0 ? -1 : good;
}

/* A list of (tensor, address, key set) as an array; NULL with an error. */
static Sample *
read_samples(PyObject *list, Py_ssize_t *n)
{
    *n = PyList_GET_SIZE(list);
    Sample *samples = PyMem_Calloc((size_t)*n + 1, sizeof(Sample));
    if (samples == NULL) {
        PyErr_NoMemory();
        return NULL;
    }
    for (Py_ssize_t i = 0; i < *n; i++) {
        unsigned long long address, bits;
        PyObject *item = PyList_GET_ITEM(list, i);
        if (!PyTuple_Check(item) || !PyArg_ParseTuple(item, "OKK", &samples[i].tensor, &address, &bits)) {
            if (!PyErr_Occurred()) {
                PyErr_SetString(PyExc_TypeError, "samples are tuples (tensor, address of its TensorImpl, key set)");
            }
            PyMem_Free(samples);
            return NULL;
        }
        samples[i].impl = (void *)(uintptr_t)address;
        samples[i].key_set = bits;
        if (samples[i].impl == NULL) {
            PyErr_SetString(PyExc_ValueError, "a sample without a TensorImpl");
            PyMem_Free(samples);
            return NULL;
        }
    }
    return samples;
}

static PyObject *
calibrate_tensors(PyObject *Py_UNUSED(module), PyObject *args)
{
    const char *library, *why = NULL;
    PyObject *sample_list, *toggle_list;
    if (!PyArg_ParseTuple(args, "sO!O!:calibrate_tensors", &library, &PyList_Type, &sample_list, &PyList_Type,
                          &toggle_list)) {
        return NULL;
    }
    Py_ssize_t n = 0, n_toggles = 0;
    Sample *samples = read_samples(sample_list, &n);
    Sample *toggles = samples == NULL ? NULL : read_samples(toggle_list, &n_toggles);
    memory.on = 0;
    int good = toggles == NULL ? -1 : calibrate(library, samples, n, toggles, n_toggles, &why);
    memory.on = good == 1;
    PyMem_Free(samples);
    PyMem_Free(toggles);
    if (good < 0) {
        return NULL;
    }
    if (good) {
        Py_RETURN_NONE;
    }
    return PyUnicode_FromString(why);
}

static PyObject *
read_tensors_by_attributes(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(unused))
{
    memory.on = 0;
    Py_RETURN_NONE;
}

PyMethodDef mb_tensor_methods[] = {
    {"calibrate_tensors", calibrate_tensors, METH_VARARGS, NULL},
    {"read_tensors_by_attributes", read_tensors_by_attributes, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};
