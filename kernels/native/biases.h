/* Biases of an expert's rows: added to them, their gradient, and their part in that of the routing weights. */
#ifndef MOEBIUS_BIASES_H
#define MOEBIUS_BIASES_H

#include <stdint.h>

#include "elements.h"

/* Rows [count, stride] of an expert, of which columns low..low + width are meant, and a vector of so many elements. scale:
   of each row, or NULL. */
typedef struct {
    char *rows, *vector;
    Dtype dtype, vector_dtype;
    long count, stride, low, width, step; /* step: of the vector, in elements */
    float *scale;
} Biased;

/* rows[r] += scale[r] * vector */
void biases_add(const Biased *task);

/* vector (+)= the sum of scale[r] * rows[r]. add: to what is there. */
void biases_sum(const Biased *task, int add);

/* dots[r] += <rows[r], vector> */
void biases_dot(const Biased *task, float *dots);

#endif
