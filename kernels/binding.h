/* Common code of the Python bindings: the limited API, and conversion of Python buffers to flat C arrays. */
#ifndef EDGEFL_BINDING_H
#define EDGEFL_BINDING_H

#define Py_LIMITED_API 0x030b0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <string.h>

#include "edgefl_kernels.h"

#define GIL_BYTES (1 << 18)    /* calls on fewer bytes keep the GIL: they end before another thread could use it */
#define THREAD_BYTES (1 << 20) /* minimum bytes per thread, because waking a thread takes about 10 us */

static inline int share(int64_t bytes, long threads)
{
    const int64_t useful = bytes / THREAD_BYTES;
    return threads < 1 || useful < 1 ? 1 : useful < threads ? (int)useful : (int)threads;
}

/* Release the GIL before a call that processes this number of bytes, unless they are few. Return what take_gil needs to
 * get the GIL back: NULL if the caller has kept it. */
static inline PyThreadState *leave_gil(int64_t bytes) { return bytes < GIL_BYTES ? NULL : PyEval_SaveThread(); }
static inline void take_gil(PyThreadState *left)
{
    if (left) PyEval_RestoreThread(left);
}

/* Get a flat C-contiguous buffer. Return 0 on failure, without a Python error. The caller must release the view in any
 * case. */
static inline int flat(PyObject *o, Py_buffer *view, int writable)
{
    const int flags = PyBUF_FORMAT | PyBUF_ND | PyBUF_C_CONTIGUOUS | (writable ? PyBUF_WRITABLE : 0);
    if (PyObject_GetBuffer(o, view, flags)) {
        PyErr_Clear();
        memset(view, 0, sizeof *view);
        return 0;
    }
    return view->ndim == 1;
}

/* Return 1 if a buffer has this format and item size. NumPy exports some arrays, such as unaligned ones, with a prefix
 * ("=f"), which is ignored. */
static inline int is_format(const Py_buffer *view, char code, Py_ssize_t itemsize)
{
    const char *format = view->format ? view->format : "B";
    if (*format == '=' || *format == '<' || *format == '@') format++;
    return format[0] == code && !format[1] && view->itemsize == itemsize;
}

static inline int is_int64(const Py_buffer *view) { return is_format(view, 'l', 8) || is_format(view, 'q', 8); }
static inline int is_uint64(const Py_buffer *view) { return is_format(view, 'L', 8) || is_format(view, 'Q', 8); }

/* Get a flat buffer of n float32 elements (of any number if n < 0). Return 0 on failure, like `flat`. */
static inline int is_floats(PyObject *o, Py_buffer *view, int writable, int64_t n)
{
    return flat(o, view, writable) && is_format(view, 'f', 4) && (n < 0 || view->len == n * 4);
}

static inline int overlap(const Py_buffer *a, const Py_buffer *b)
{
    const char *p = a->buf, *q = b->buf;
    return a->len && b->len && p < q + b->len && q < p + a->len;
}

static inline int dtype_of(const Py_buffer *view)
{
    if (is_format(view, 'f', 4)) return EF_F32;
    if (is_format(view, 'e', 2)) return EF_F16;
    if (is_format(view, 'H', 2)) return EF_BF16;
    if (is_format(view, 'b', 1)) return EF_I8;
    return -1;
}

/* Convert an iterable to a tuple (new reference), or return NULL without a Python error. */
static inline PyObject *items_of(PyObject *o)
{
    PyObject *items = PySequence_Tuple(o);
    if (!items) PyErr_Clear();
    return items;
}

static inline int number_of(PyObject *o, double *x)
{
    *x = PyFloat_AsDouble(o);
    if (*x == -1.0 && PyErr_Occurred()) {
        PyErr_Clear();
        return 0;
    }
    return 1;
}

/* Convert the update `o` of n elements (any number if n < 0), and its scales if its type is int8. */
static inline int update_of(PyObject *o, PyObject *scale, int64_t n, ef_update *u, Py_buffer *view, Py_buffer *scales)
{
    if (!flat(o, view, 0) || (u->dtype = dtype_of(view)) < 0) return 0;
    if (n < 0) n = view->len / view->itemsize;
    if (view->len != n * view->itemsize) return 0;
    u->data = view->buf;
    u->scales = NULL;
    if ((u->dtype == EF_I8) != (scale && scale != Py_None)) return 0;
    if (u->dtype != EF_I8) return 1;
    if (!flat(scale, scales, 0) || !is_format(scales, 'f', 4)) return 0;
    u->scales = scales->buf;
    return scales->len == (n + EF_SCALE_BLOCK - 1) / EF_SCALE_BLOCK * 4;
}

static inline void release(Py_buffer *views, Py_ssize_t count)
{
    for (Py_ssize_t i = 0; i < count; i++)
        if (views[i].obj) PyBuffer_Release(&views[i]);
}

/* bind_sum.c, bind_quantize.c, bind_order.c, bind_field.c, delta.c */
PyObject *ef_py_weighted_sum(PyObject *self, PyObject *const *args, Py_ssize_t nargs);
PyObject *ef_py_quantize(PyObject *self, PyObject *const *args, Py_ssize_t nargs);
PyObject *ef_py_order(PyObject *self, PyObject *const *args, Py_ssize_t nargs);
PyObject *ef_py_field_sum(PyObject *self, PyObject *const *args, Py_ssize_t nargs);
PyObject *ef_py_field_encode(PyObject *self, PyObject *const *args, Py_ssize_t nargs);
PyObject *ef_py_field_decode(PyObject *self, PyObject *const *args, Py_ssize_t nargs);
PyObject *ef_py_delta(PyObject *self, PyObject *const *args, Py_ssize_t nargs);

#define FAST(f) (PyCFunction)(void (*)(void))(f), METH_FASTCALL

#endif
