/* Short runs of numbers, in float32: elements converted in and out, and the named activations with their slopes.

   Each loop is over a run that fits the first-level cache, without a branch, so that the compiler makes vector code of
   it; CLONED functions exist once for each vector width, and the loader picks one. */
#ifndef MOEBIUS_ELEMENTS_H
#define MOEBIUS_ELEMENTS_H

#include <stdint.h>

#define RUN 256 /* elements of a run */

/* Function clones are chosen through ifunc, which is glibc's. */
#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#define CLONED __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define CLONED
#endif

#ifdef __GNUC__
#define INLINED inline __attribute__((always_inline))
#else
#define INLINED inline
#endif

typedef enum { FLOAT32, BFLOAT16, FLOAT16, FLOAT64 } Dtype; /* FLOAT64: of products alone */

static inline long dtype_bytes(Dtype dtype) { return dtype == FLOAT64 ? 8 : dtype == FLOAT32 ? 4 : 2; }

/* The names of kernels/activations.py. */
typedef enum { SILU, GELU_TANH, RELU, RELU2, SIGMOID, IDENTITY, GELU, ACTIVATIONS } Activation;

/* to[i] = from[first + i * stride], and back. Storing rounds to nearest, ties to even. stride is 1 or 2. */
void elements_load(float *to, const void *from, Dtype dtype, long first, int stride, int count);
void elements_store(void *to, const float *from, Dtype dtype, long first, int stride, int count);

/* total[i] += from[first + i] */
void elements_add(float *total, const void *from, Dtype dtype, long first, int count);

/* a[i] = f(gate[i]) * up[i] * scale; up is NULL where there is none. */
void elements_gated(float *a, const float *gate, const float *up, float scale, Activation activation, int count);

/* Where a run's gradients go. up: unused where there is none. */
typedef struct {
    float *a;    /* A times its weight, for the gradient of the down weights */
    float *gate; /* dG */
    float *up;   /* dU */
    float *dot;  /* dA A, whose sum is the weight's gradient */
} Grads;

/* With A = f(g) u and dA = grad_a, before the weight s = scale:  d = s dA;  dU = d f(g);  dG = d u f'(g).
   At a kink the slope is torch's: 0. No two of these arrays overlap. */
void elements_gated_backward(Grads out, const float *gate, const float *up, const float *grad_a, float scale,
                             Activation activation, int count);

/* The sum of a[i], in an order that depends on count alone. */
float elements_sum(const float *a, int count);

#endif
