/* Products in float32 of our own, where the library has none for the processor's vectors of 512 bits. */
#ifndef MOEBIUS_GEMM_H
#define MOEBIUS_GEMM_H

#include <stdint.h>

typedef struct {
    char *address;
    int64_t sizes[2], strides[2];
} Matrix;

/* Whether this processor is one whose library products leave something: it has such vectors, and is not Intel's. MKL,
   which torch comes with, gives other makers' processors its code for 256 bits, packs both operands and scales the room
   for the result first. */
int gemm_find(void);

/* Turns it off and on. Returns what it was. */
int gemm_use(int use);

/* out = left @ right, or out += left @ right, in the caller's thread; 0, having done nothing, where gemm_find() says no,
   and where it would not pay: few rows, numbers that lie side by side along neither axis.

   An element is summed along the inner axis in blocks that depend on its length alone, each product and sum rounded once:
   the same bits whatever the other rows and columns are. */
int gemm(const Matrix *out, const Matrix *left, const Matrix *right, int add);

#endif
