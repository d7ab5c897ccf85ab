/* Between the products: the gated activation of rows of H, and its gradient. */
#ifndef MOEBIUS_GATED_H
#define MOEBIUS_GATED_H

#include "elements.h"

typedef enum { CONCAT, INTERLEAVED, UNGATED } Gate;

typedef struct {
    const char *h;      /* [count, M] */
    const char *grad_a; /* [count, N], backward alone: dA before the routing weight */
    const float *scale; /* [count], or NULL where each weight is one */
    char *a;            /* [count, N], out: A times its weight */
    char *grad_h;       /* [count, M], out, backward alone */
    float *dot;         /* [count], out: <dA, A>; NULL where nobody asks */
    long count, width;  /* rows; N */
    Dtype dtype, h_dtype; /* of all the others; of h */
    Gate gate;
    Activation activation;
} Gated;

/* Rows low..high of a Gated, as threads.h wants it. */
void gated_forward(const void *task, long low, long high);
void gated_backward(const void *task, long low, long high);

#endif
