/* Matrices of 16 bits multiplied in float32, which holds the same numbers: where the library has nothing fast for theirs
   (widening.py says where). */
#ifndef MOEBIUS_WIDE_H
#define MOEBIUS_WIDE_H

#include <stdint.h>

#include "products.h"

/* A matrix in float32, side by side in the order in which it lies there: its numbers are at `room`. */
Matrix widened(const Matrix *matrix, float *room);

typedef enum { WIDEN, NARROW, NARROW_SUM } Copy;

/* Between a matrix of 16 bits and the same widened. NARROW_SUM: what is there is added, and rounded once. */
void copy(const Matrix *narrow, const Matrix *wide, Dtype dtype, Copy how);

/* As product(), rounded once. room: so many numbers, for this many threads. */
int wide_product(const Matrix *out, const Matrix *left, const Matrix *right, Dtype dtype, int add, float *room,
                 int threads);
int64_t wide_room(const Matrix *left, const Matrix *right, int threads);

#endif
