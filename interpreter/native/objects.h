/* The functions of objects.c, which the module `reentry` has beside its own. */
#ifndef MOEBIUS_OBJECTS_H
#define MOEBIUS_OBJECTS_H

#include <Python.h>

extern PyMethodDef mb_object_functions[];

#endif
