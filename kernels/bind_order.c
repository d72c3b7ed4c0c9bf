/* Python bindings of trimmed means and inner products of updates. */
#include "binding.h"

#include <stdlib.h>

enum { TARGET, NETWORK, VECTORS };

/* Convert the updates and their scales. Return the number of updates, or -1 if an argument is invalid. If *n < 0, the
 * updates may have any length, but all must have the same. */
static Py_ssize_t updates_of(PyObject *updates, PyObject *scales, int64_t *n, ef_update **u, Py_buffer **views)
{
    const Py_ssize_t count = PyTuple_Size(updates);
    if (count < 1 || count > EF_MOST_ORDERED || (scales && PyTuple_Size(scales) != count)) return -1;
    *u = PyMem_Calloc((size_t)count, sizeof **u);
    *views = PyMem_Calloc((size_t)(2 * count), sizeof **views);
    if (!*u || !*views) return -1;
    for (Py_ssize_t k = 0; k < count; k++) {
        Py_buffer *view = *views + 2 * k;
        PyObject *scale = scales ? PyTuple_GetItem(scales, k) : NULL;
        if (!update_of(PyTuple_GetItem(updates, k), scale, *n, *u + k, view, view + 1)) return -1;
        *n = view->len / view->itemsize;
    }
    return count;
}

/* trimmed_mean(out, updates, scales, network, trim, threads) -> True, or None
 * products(out, updates, scales, threads) -> True, or None; out is a float64 array of count x count elements */
PyObject *ef_py_order(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    Py_buffer own[VECTORS] = {{0}}, *views = NULL;
    PyObject *updates = NULL, *scales = NULL;
    ef_order o = {0};
    ef_update *u = NULL;
    Py_ssize_t count = -1;
    int64_t n = -1;
    int ok = 0, failed = 0;
    const int trimmed = nargs == 6;
    (void)self;
    if (nargs != 6 && nargs != 4) return PyErr_Format(PyExc_TypeError, "takes 6 or 4 arguments (got %zd)", nargs);
    const long threads = PyLong_AsLong(args[nargs - 1]);
    o.trim = trimmed ? PyLong_AsLongLong(args[4]) : 0;
    if (PyErr_Occurred()) return NULL;
    if (!flat(args[0], &own[TARGET], 1) || !is_format(&own[TARGET], trimmed ? 'f' : 'd', trimmed ? 4 : 8)) goto done;
    if (!(updates = items_of(args[1]))) goto done;
    if (args[2] != Py_None && !(scales = items_of(args[2]))) goto done;
    if (trimmed) {
        n = own[TARGET].len / 4;
        if (!flat(args[3], &own[NETWORK], 0) || !is_format(&own[NETWORK], 'i', 4)) goto done;
    }
    if ((count = updates_of(updates, scales, &n, &u, &views)) < 0) goto done;
    o.u = u, o.count = count, o.n = n;
    if (trimmed) {
        o.out = own[TARGET].buf, o.network = own[NETWORK].buf, o.pairs = own[NETWORK].len / 8;
        if (o.trim < 0 || 2 * o.trim >= count) goto done;
        for (int64_t p = 0; p < 2 * o.pairs; p++)
            if (o.network[p] < 0 || o.network[p] >= count) goto done;
        for (Py_ssize_t k = 0; k < 2 * count; k++)
            if (overlap(&own[TARGET], &views[k])) goto done;
    } else if (own[TARGET].len != (int64_t)count * count * 8) goto done;
    ok = 1;
    Py_BEGIN_ALLOW_THREADS
    if (trimmed) ef_trimmed_mean(&o, share(n * count * 4, threads));
    else failed = ef_products(&o, own[TARGET].buf, share(n * count * count, threads));
    Py_END_ALLOW_THREADS
done:
    if (views) release(views, 2 * PyTuple_Size(updates));
    release(own, VECTORS);
    PyMem_Free(views);
    PyMem_Free(u);
    Py_XDECREF(updates);
    Py_XDECREF(scales);
    if (failed) return PyErr_NoMemory();
    return Py_NewRef(ok ? Py_True : Py_None);
}
