/* Python bindings of the arithmetic modulo 2^32 - 5, for secure aggregation. */
#include "binding.h"

static int is_words(PyObject *o, Py_buffer *view, int writable, int64_t n)
{
    return flat(o, view, writable) && is_format(view, 'I', 4) && (n < 0 || view->len == n * 4);
}

/* field_sum(out, vectors, weights, threads) -> True, or None: see module.c */
PyObject *ef_py_field_sum(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    PyObject *vectors = NULL, *weights = NULL;
    Py_buffer out = {0}, *views = NULL;
    const ef_loose_uint32 **v = NULL;
    uint64_t *w = NULL, total = 0;
    Py_ssize_t count = 0;
    int ok = 0;
    (void)self;
    if (nargs != 4) return PyErr_Format(PyExc_TypeError, "field_sum takes 4 arguments (got %zd)", nargs);
    const long threads = PyLong_AsLong(args[3]);
    if (threads == -1 && PyErr_Occurred()) return NULL;
    if (!(vectors = items_of(args[1])) || !(weights = items_of(args[2]))) goto done;
    count = PyTuple_Size(vectors);
    if (PyTuple_Size(weights) != count || count > EF_MOST_FIELD || !is_words(args[0], &out, 1, -1)) goto done;
    views = PyMem_Calloc((size_t)count + 1, sizeof *views);
    v = PyMem_Calloc((size_t)count + 1, sizeof *v);
    w = PyMem_Calloc((size_t)count + 1, sizeof *w);
    if (!views || !v || !w) goto done;
    for (Py_ssize_t k = 0; k < count; k++) {
        const unsigned long long weight = PyLong_AsUnsignedLongLong(PyTuple_GetItem(weights, k));
        if (PyErr_Occurred()) PyErr_Clear();
        if (weight >= EF_PRIME || !is_words(PyTuple_GetItem(vectors, k), &views[k], 0, out.len / 4)) goto done;
        if (overlap(&out, &views[k])) goto done;
        v[k] = views[k].buf, w[k] = weight, total += weight;
    }
    ok = 1;
    const ef_field_sum s = {out.buf, v, w, count, out.len / 4, total <= UINT32_MAX};
    Py_BEGIN_ALLOW_THREADS
    ef_field_sum_of(&s, share(out.len * (count + 1), threads));
    Py_END_ALLOW_THREADS
done:
    if (views) release(views, count);
    release(&out, 1);
    PyMem_Free(views);
    PyMem_Free(v);
    PyMem_Free(w);
    Py_XDECREF(vectors);
    Py_XDECREF(weights);
    return Py_NewRef(ok ? Py_True : Py_None);
}

/* field_encode(out, update, mask, clip, factor, threads) -> the number of clipped elements, or None */
PyObject *ef_py_field_encode(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    Py_buffer views[3] = {{0}};
    double clip, factor;
    int64_t over = 0, n = 0;
    (void)self;
    if (nargs != 6) return PyErr_Format(PyExc_TypeError, "field_encode takes 6 arguments (got %zd)", nargs);
    const long threads = PyLong_AsLong(args[5]);
    if (threads == -1 && PyErr_Occurred()) return NULL;
    int ok = is_words(args[0], &views[0], 1, -1);
    if (ok) n = views[0].len / 4;
    ok = ok && is_floats(args[1], &views[1], 0, n) && is_words(args[2], &views[2], 0, n);
    ok = ok && !overlap(&views[0], &views[1]) && (views[0].buf == views[2].buf || !overlap(&views[0], &views[2]));
    if (ok && number_of(args[3], &clip) && number_of(args[4], &factor)) {
        const ef_field_code c = {views[1].buf, views[0].buf, views[2].buf, n, (float)clip, (float)factor};
        Py_BEGIN_ALLOW_THREADS
        over = ef_field_encode(&c, share(3 * views[0].len, threads));
        Py_END_ALLOW_THREADS
    } else ok = 0;
    release(views, 3);
    return ok ? PyLong_FromLongLong(over) : Py_NewRef(Py_None);
}

/* field_decode(out, words, mask, factor, threads) -> the largest magnitude, or None */
PyObject *ef_py_field_decode(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    Py_buffer views[3] = {{0}};
    double factor;
    uint32_t largest = 0;
    int64_t n = 0;
    (void)self;
    if (nargs != 5) return PyErr_Format(PyExc_TypeError, "field_decode takes 5 arguments (got %zd)", nargs);
    const long threads = PyLong_AsLong(args[4]);
    if (threads == -1 && PyErr_Occurred()) return NULL;
    int ok = is_words(args[1], &views[1], 0, -1);
    if (ok) n = views[1].len / 4;
    ok = ok && is_floats(args[0], &views[0], 1, n) && is_words(args[2], &views[2], 0, n);
    ok = ok && !overlap(&views[0], &views[1]) && !overlap(&views[0], &views[2]) && number_of(args[3], &factor);
    if (ok) {
        const ef_field_code c = {views[0].buf, views[1].buf, views[2].buf, n, 0.0f, (float)factor};
        Py_BEGIN_ALLOW_THREADS
        largest = ef_field_decode(&c, share(3 * views[0].len, threads));
        Py_END_ALLOW_THREADS
    }
    release(views, 3);
    return ok ? PyLong_FromUnsignedLong(largest) : Py_NewRef(Py_None);
}
