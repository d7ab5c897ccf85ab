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

/* Its two halves, where gemm_find() says yes. A packed right operand [deep, columns] is panels of GEMM_COLUMNS columns,
   `deep` times that many numbers each, aligned to 64 bytes. down, along: an operand's strides, one of them 1. */
#define GEMM_COLUMNS 32
#define GEMM_DEEP 512 /* the longest inner axis that is summed at once, where left's numbers lie side by side down */
void gemm_pack(float *to, const float *from, int64_t down, int64_t along, int64_t deep, int64_t columns);

/* panel: numbers from one panel to the next, of which the first `deep` rows are multiplied. */
void gemm_packed(float *out, int64_t stride, const float *left, int64_t down, int64_t along, int64_t rows,
                 const float *right, int64_t panel, int64_t deep, int64_t columns, int add);

#endif
