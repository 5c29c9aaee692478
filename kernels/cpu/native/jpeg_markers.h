#pragma once
#include <Python.h>

PyObject *find_marker(PyObject *self, PyObject *args);
