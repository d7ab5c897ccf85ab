/* A whole layer of experts, forward or backward, each thread with experts of its own.

   Products of a few hundred rows gain little from a second thread inside, and all that is between them would wait for
   it. So each thread takes whole experts: it gathers their rows, multiplies, and adds up results by token in a total
   of its own; the totals are summed at the end. Which thread has which expert is the caller's choice. */
#ifndef MOEBIUS_LAYER_H
#define MOEBIUS_LAYER_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdint.h>

/* Rows low.. of the weights of all experts: the matrix of expert e is `offset` elements from table[e] on; a table's entry
   is 0 where there is none. */
typedef struct {
    int64_t low, table, offset, rows, columns, down, right; /* down, right: strides, in elements */
} Block;

/* As by_expert.py fills it: all int64. Addresses are 0 where nothing is. Strides count elements, sizes bytes. */
typedef struct {
    int64_t dtype, work, activation, gate;        /* work: dtype, or wider */
    int64_t tokens, width, narrow, width_h, rows; /* T, D, N, M, S */
    int64_t x, x_stride;                          /* [T, D] */
    int64_t order, top_k;                         /* int32 [S]: the slot of each row; row r is of token slot / top_k */
    int64_t scale;                                /* float32, by slot; 0: all ones */
    int64_t h;                                    /* [S, M], or 0: not kept, and backward computes it again */
    int64_t ups, up_count, downs, down_count;     /* Block[] of gate_up [M, D] and down [D, N] */
    int64_t up_biases, up_bias_count, down_biases, down_bias_count; /* Block[] of theirs, [M, 1] and [D, 1] */
    int64_t segments, bounds, groups;             /* Segment[]; those of group g are bounds[g]..bounds[g + 1] */
    int64_t totals, distinct; /* each group's float32 [T, D], or 0; how many: 1 is for all, and is zero already */
    int64_t out;                                  /* [T, D]: the sum of the totals, in dtype */
    int64_t scratch, scratch_step, room;          /* bytes; the rows of the largest segment */
    int64_t matrix, lists;                        /* where in a group's scratch, in bytes: a block is widened; three
                                                     numbers of 4 bytes a row stand */
    /* backward alone */
    int64_t grad, grad_stride;                    /* [T, D] */
    int64_t dot;                                  /* float32, by slot: <dA, A>, or 0 */
    int64_t grad_ups, grad_up_count, grad_downs, grad_down_count;
    int64_t grad_up_biases, grad_up_bias_count, grad_down_biases, grad_down_bias_count;
} Layer;


PyObject *layer_forward(PyObject *module, PyObject *address);
PyObject *layer_backward(PyObject *module, PyObject *address);

#endif
