/* How deep the machine may nest: bytes left on this thread's C stack, and CPython's own count of nested C calls. */
#define _GNU_SOURCE
#define MOEBIUS_NEEDS_FRAMES
#include "cpython_private.h"
#include "room.h"

#include <pthread.h>

#define STACK_RESERVE (512 * 1024)    /* bytes of C stack left free: what C code may need between two of our checks */

static __thread char *stack_end;    /* the lowest address to use */

static Py_ssize_t
stack_left(void)
{
    char marker;
    if (stack_end == NULL) {
        pthread_attr_t attributes;
        void *base = NULL;
        size_t size = 0, guard = 0;
        if (pthread_getattr_np(pthread_self(), &attributes) == 0) {
            pthread_attr_getstack(&attributes, &base, &size);
            pthread_attr_getguardsize(&attributes, &guard);
            pthread_attr_destroy(&attributes);
        }
        size_t reserve = size / 4 < STACK_RESERVE ? size / 4 : STACK_RESERVE;
        stack_end = base == NULL ? (char *)1 : (char *)base + guard + reserve;
    }
    return (char *)&marker - stack_end;
}

int
mb_has_room(void)
{
    if (stack_left() > 0) {
        return 1;
    }
    PyErr_SetString(PyExc_RecursionError, "maximum recursion depth exceeded: the C stack is nearly used up");
    return 0;
}

/* ---- levels of recursion ----
 *
 * 3.12 and 3.13 bound the nesting of C code by a count of its own; 3.14 by the address on the C stack, as we do. What bounds the machine is the C stack, by
 * `mb_has_room`: called by C code, it gets as many levels as the stack has bytes for. */
#define BYTES_A_LEVEL 1024

int
mb_begin_machine(void)
{
    int given = 0;
#ifdef MB_C_RECURSION_LIMIT
    int *room = mb_c_recursion_room(PyThreadState_Get());
    Py_ssize_t wanted = stack_left() / BYTES_A_LEVEL;
    wanted = wanted > MB_C_RECURSION_LIMIT ? MB_C_RECURSION_LIMIT : wanted;
    given = wanted > *room ? (int)wanted - *room : 0;
    *room += given;
#endif
    return given;
}

void
mb_end_machine(int given)
{
#ifdef MB_C_RECURSION_LIMIT
    *mb_c_recursion_room(PyThreadState_Get()) -= given;
#else
    (void)given;
#endif
}
