/* The Python binding, on the limited API (one binary for CPython 3.11 and later).
 *
 * Functions that take arrays answer None when an argument is not what they need, without saying which:
 * edgefl/kernels/arguments.py is the one place that checks by name and words the errors. */
#include "binding.h"

#ifndef EF_SOURCES
#define EF_SOURCES "unknown"
#endif

static int dtype_of(const Py_buffer *view)
{
    if (is_format(view, 'f', 4)) return EF_F32;
    if (is_format(view, 'e', 2)) return EF_F16;
    if (is_format(view, 'H', 2)) return EF_BF16;
    if (is_format(view, 'b', 1)) return EF_I8;
    return -1;
}

/* A tuple (new reference) of any iterable, or NULL with no error set. */
static PyObject *items_of(PyObject *o)
{
    PyObject *items = PySequence_Tuple(o);
    if (!items) PyErr_Clear();
    return items;
}

static int number_of(PyObject *o, double *x)
{
    *x = PyFloat_AsDouble(o);
    if (*x == -1.0 && PyErr_Occurred()) {
        PyErr_Clear();
        return 0;
    }
    return 1;
}

/* The update in `o` and, for int8, its scales; n < 0 takes the update's own length. */
static int update_of(PyObject *o, PyObject *scale, int64_t n, ef_update *u, Py_buffer *view, Py_buffer *scales)
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

#define SMALL 16
enum { OUT, BASE, NORMS, SUMS, FIRST };

/* weighted_sum(out, base, updates, weights, scales, norms, checksums, threads) -> True, or None: see above */
static PyObject *weighted_sum(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    Py_buffer few_views[FIRST + 2 * SMALL] = {{0}}, *views = few_views;
    ef_update few[SMALL], *u = few;
    PyObject *updates = NULL, *weights = NULL, *scales = NULL, *result = NULL;
    Py_ssize_t count = 0;
    int64_t n, bytes;
    int ok = 0, failed = 0;
    long threads;
    (void)self;
    if (nargs != 8) return PyErr_Format(PyExc_TypeError, "weighted_sum takes 8 arguments (got %zd)", nargs);
    threads = PyLong_AsLong(args[7]);
    if (threads == -1 && PyErr_Occurred()) return NULL;
    if (!(updates = items_of(args[2])) || !(weights = items_of(args[3]))) goto done;
    count = PyTuple_Size(updates);
    if (PyTuple_Size(weights) != count) goto done;
    if (args[4] != Py_None && (!(scales = items_of(args[4])) || PyTuple_Size(scales) != count)) goto done;
    if (count > SMALL) {
        views = PyMem_Calloc((size_t)(FIRST + 2 * count), sizeof *views);
        u = PyMem_Malloc((size_t)count * sizeof *u);
        if (!views || !u) {
            PyErr_NoMemory();
            failed = 1;
            goto done;
        }
    }
    if (!flat(args[0], &views[OUT], 1) || !is_format(&views[OUT], 'f', 4)) goto done;
    if (!flat(args[5], &views[NORMS], 1) || !is_format(&views[NORMS], 'd', 8)) goto done;
    if (views[NORMS].len != count * 8) goto done;
    if (args[6] != Py_None) {
        if (!flat(args[6], &views[SUMS], 1) || !is_uint64(&views[SUMS])) goto done;
        if (views[SUMS].len != count * 8) goto done;
    }
    n = views[OUT].len / 4;
    if (args[1] != Py_None) {
        if (!flat(args[1], &views[BASE], 0) || !is_format(&views[BASE], 'f', 4)) goto done;
        if (views[BASE].len != views[OUT].len) goto done;
        if (views[BASE].buf != views[OUT].buf && overlap(&views[OUT], &views[BASE])) goto done;
    }
    bytes = n * 8;
    for (Py_ssize_t j = 0; j < count; j++) {
        double weight;
        PyObject *scale = scales ? PyTuple_GetItem(scales, j) : NULL;
        Py_buffer *view = &views[FIRST + 2 * j];
        if (!number_of(PyTuple_GetItem(weights, j), &weight)) goto done;
        u[j].weight = (float)weight;
        if (!update_of(PyTuple_GetItem(updates, j), scale, n, &u[j], view, view + 1)) goto done;
        if (overlap(&views[OUT], view) || overlap(&views[OUT], view + 1)) goto done;
        bytes += view->len;
    }
    ok = 1;
    if (bytes < GIL_BYTES) {
        failed = ef_weighted_sum(views[OUT].buf, views[BASE].buf, u, count, n, views[NORMS].buf,
                                 views[SUMS].buf, 1);
    } else {
        Py_BEGIN_ALLOW_THREADS
        failed = ef_weighted_sum(views[OUT].buf, views[BASE].buf, u, count, n, views[NORMS].buf,
                                 views[SUMS].buf, share(bytes, threads));
        Py_END_ALLOW_THREADS
    }
    if (failed) PyErr_NoMemory();
done:
    if (views) release(views, FIRST + 2 * count);
    if (views != few_views) PyMem_Free(views);
    if (u != few) PyMem_Free(u);
    Py_XDECREF(updates);
    Py_XDECREF(weights);
    Py_XDECREF(scales);
    if (!failed) result = Py_NewRef(ok ? Py_True : Py_None);
    return result;
}

/* sq_norm(update, scale, threads) -> float, or None */
static PyObject *sq_norm(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    Py_buffer views[2] = {{0}};
    ef_update u;
    double norm = 0.0;
    int ok, failed = 0;
    long threads;
    (void)self;
    if (nargs != 3) return PyErr_Format(PyExc_TypeError, "sq_norm takes 3 arguments (got %zd)", nargs);
    threads = PyLong_AsLong(args[2]);
    if (threads == -1 && PyErr_Occurred()) return NULL;
    ok = update_of(args[0], args[1], -1, &u, &views[0], &views[1]);
    if (ok) {
        const int64_t n = views[0].len / views[0].itemsize;
        if (views[0].len < GIL_BYTES) {
            failed = ef_sq_norm(&u, n, 1, &norm);
        } else {
            Py_BEGIN_ALLOW_THREADS
            failed = ef_sq_norm(&u, n, share(views[0].len, threads), &norm);
            Py_END_ALLOW_THREADS
        }
    }
    release(views, 2);
    if (failed) return PyErr_NoMemory();
    return ok ? PyFloat_FromDouble(norm) : Py_NewRef(Py_None);
}

/* checksum(buffer, threads) -> int, or None */
static PyObject *checksum(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    Py_buffer view = {0};
    uint64_t sum = 0;
    int ok;
    long threads;
    (void)self;
    if (nargs != 2) return PyErr_Format(PyExc_TypeError, "checksum takes 2 arguments (got %zd)", nargs);
    threads = PyLong_AsLong(args[1]);
    if (threads == -1 && PyErr_Occurred()) return NULL;
    ok = flat(args[0], &view, 0);
    if (ok && view.len < GIL_BYTES) {
        sum = ef_checksum(view.buf, view.len, 1);
    } else if (ok) {
        Py_BEGIN_ALLOW_THREADS
        sum = ef_checksum(view.buf, view.len, share(view.len, threads));
        Py_END_ALLOW_THREADS
    }
    release(&view, 1);
    return ok ? PyLong_FromUnsignedLongLong(sum) : Py_NewRef(Py_None);
}

/* observe(mode, width, decay, count, state, ids, values, means) -> True, or None; with ids an int and values
 * a float: the mean. All ids and values are checked before the first is applied. */
static PyObject *observe(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    Py_buffer views[5] = {{0}};
    PyObject *result = NULL;
    ef_means m;
    (void)self;
    if (nargs != 8) return PyErr_Format(PyExc_TypeError, "observe takes 8 arguments (got %zd)", nargs);
    m.mode = (int)PyLong_AsLong(args[0]);
    m.width = PyLong_AsLongLong(args[1]);
    m.decay = PyFloat_AsDouble(args[2]);
    if (PyErr_Occurred()) return NULL;
    if (!flat(args[3], &views[0], 1) || !is_int64(&views[0])) goto done;
    if (!flat(args[4], &views[1], 1) || !is_format(&views[1], 'd', 8)) goto done;
    m.count = views[0].buf;
    m.clients = views[0].len / 8;
    m.state = views[1].buf;
    if (m.width < 1 || views[1].len != m.clients * m.width * 8) goto done;
    if (PyLong_Check(args[5])) {
        const long long id = PyLong_AsLongLong(args[5]);
        double value;
        if (id == -1 && PyErr_Occurred()) PyErr_Clear();
        if (id < 0 || id >= m.clients || !number_of(args[6], &value) || !(value - value == 0.0)) goto done;
        result = PyFloat_FromDouble(ef_observe(&m, id, value));
    } else {
        const int64_t *ids;
        const double *values;
        double *means;
        int64_t n;
        if (!flat(args[5], &views[2], 0) || !is_int64(&views[2])) goto done;
        if (!flat(args[6], &views[3], 0) || !is_format(&views[3], 'd', 8)) goto done;
        if (!flat(args[7], &views[4], 1) || !is_format(&views[4], 'd', 8)) goto done;
        if (views[3].len != views[2].len || views[4].len != views[2].len) goto done;
        ids = views[2].buf, values = views[3].buf, means = views[4].buf, n = views[2].len / 8;
        for (int64_t i = 0; i < n; i++)
            if (ids[i] < 0 || ids[i] >= m.clients || !(values[i] - values[i] == 0.0)) goto done;
        for (int64_t i = 0; i < n; i++) means[i] = ef_observe(&m, ids[i], values[i]);
        result = Py_NewRef(Py_True);
    }
done:
    release(views, 5);
    return result || PyErr_Occurred() ? result : Py_NewRef(Py_None);
}

#define FAST(f) (PyCFunction)(void (*)(void))(f), METH_FASTCALL
static PyMethodDef methods[] = {
    {"weighted_sum", FAST(weighted_sum), "weighted_sum(out, base, updates, weights, scales, norms, checksums, threads)"},
    {"sq_norm", FAST(sq_norm), "sq_norm(update, scale, threads)"},
    {"checksum", FAST(checksum), "checksum(buffer, threads)"},
    {"observe", FAST(observe), "observe(mode, width, decay, count, state, ids, values, means)"},
    {"read", FAST(ef_py_read), "read(buffers, threads)"},
    {"copy", FAST(ef_py_copy), "copy(to, from, threads)"},
    {"isas", ef_py_isas, METH_NOARGS, "Usable instruction sets, fastest first."},
    {"isa", ef_py_isa, METH_NOARGS, "The instruction set in use."},
    {"set_isa", ef_py_set_isa, METH_O, "Use this instruction set."},
    {"pool_size", ef_py_pool_size, METH_NOARGS, "How many threads of its own the pool has now."},
    {"close_pool", ef_py_close_pool, METH_NOARGS, "End and join the pool's threads."},
    {NULL, NULL, 0, NULL},
};

static int fill(PyObject *module)
{
    return PyModule_AddIntConstant(module, "ABI", EF_ABI) ||
                   PyModule_AddStringConstant(module, "SOURCES", EF_SOURCES) ||
                   PyModule_AddIntConstant(module, "TILE", EF_TILE) ||
                   PyModule_AddIntConstant(module, "SCALE_BLOCK", EF_SCALE_BLOCK)
               ? -1
               : 0;
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, fill}, {0, NULL}};
static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_c", "edgefl's native kernels.", 0, methods, slots, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__c(void) { return PyModuleDef_Init(&definition); }
