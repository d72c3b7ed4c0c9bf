/* The Python binding. It uses the limited API, so that one binary is valid for CPython 3.11 and later versions.
 *
 * Functions that take arrays return None if an argument is invalid. edgefl/kernels/arguments.py then checks each
 * argument and raises an exception that names the invalid one. */
#include "binding.h"

#ifndef EF_SOURCES
#define EF_SOURCES "unknown"
#endif

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
        PyThreadState *state = leave_gil(views[0].len);
        failed = ef_sq_norm(&u, n, share(views[0].len, threads), &norm);
        take_gil(state);
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
    if (ok) {
        PyThreadState *state = leave_gil(view.len);
        sum = ef_checksum(view.buf, view.len, share(view.len, threads));
        take_gil(state);
    }
    release(&view, 1);
    return ok ? PyLong_FromUnsignedLongLong(sum) : Py_NewRef(Py_None);
}

/* observe(mode, width, decay, count, state, ids, values, means) -> True, or None. All ids and values are checked before
 * the first value is added to its mean. */
static PyObject *observe(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    Py_buffer views[5] = {{0}};
    ef_means m;
    int ok = 0;
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
    if (!flat(args[5], &views[2], 0) || !is_int64(&views[2])) goto done;
    if (!flat(args[6], &views[3], 0) || !is_format(&views[3], 'd', 8)) goto done;
    if (!flat(args[7], &views[4], 1) || !is_format(&views[4], 'd', 8)) goto done;
    if (views[3].len != views[2].len || views[4].len != views[2].len) goto done;
    const int64_t n = views[2].len / 8;
    const int64_t *ids = views[2].buf;
    const double *values = views[3].buf;
    double *means = views[4].buf;
    for (int64_t i = 0; i < n; i++)
        if (ids[i] < 0 || ids[i] >= m.clients || !(values[i] - values[i] == 0.0)) goto done;
    for (int64_t i = 0; i < n; i++) means[i] = ef_observe(&m, ids[i], values[i]);
    ok = 1;
done:
    release(views, 5);
    return Py_NewRef(ok ? Py_True : Py_None);
}

/* Functions that read and set the instruction set and the thread pool. Most of them serve benchmarks and tests. */
static PyObject *isas(PyObject *self, PyObject *unused)
{
    PyObject *names = PyList_New(0);
    (void)self, (void)unused;
    for (int i = 0; names && ef_isa_name(i); i++) {
        PyObject *name = PyUnicode_FromString(ef_isa_name(i));
        if (!name || PyList_Append(names, name)) Py_CLEAR(names);
        Py_XDECREF(name);
    }
    return names;
}

static PyObject *isa(PyObject *self, PyObject *unused)
{
    (void)self, (void)unused;
    return PyUnicode_FromString(ef_isa_now()->name);
}

static PyObject *set_isa(PyObject *self, PyObject *name)
{
    const char *text = PyUnicode_AsUTF8AndSize(name, NULL);
    (void)self;
    if (!text) return NULL;
    if (!ef_isa_set(text))
        return PyErr_Format(PyExc_ValueError, "instruction set '%s' is not available on this machine", text);
    return Py_NewRef(Py_None);
}

static PyObject *pool_size(PyObject *self, PyObject *unused)
{
    (void)self, (void)unused;
    return PyLong_FromLong(ef_pool_size());
}

static PyObject *close_pool(PyObject *self, PyObject *unused)
{
    (void)self, (void)unused;
    Py_BEGIN_ALLOW_THREADS
    ef_pool_close();
    Py_END_ALLOW_THREADS
    return Py_NewRef(Py_None);
}

static PyMethodDef methods[] = {
    {"weighted_sum", FAST(ef_py_weighted_sum), "weighted_sum(out, base, updates, weights, scales, norms, checksums, threads)"},
    {"weighted_step", FAST(ef_py_weighted_sum), "weighted_step(…, kind, constants, old, new): a sum, then a step"},
    {"quantize", FAST(ef_py_quantize), "quantize(out, update, scales, residual, left, weight, threads)"},
    {"trimmed_mean", FAST(ef_py_order), "trimmed_mean(out, updates, scales, network, trim, threads)"},
    {"products", FAST(ef_py_order), "products(out, updates, scales, threads): all inner products"},
    {"field_sum", FAST(ef_py_field_sum), "field_sum(out, vectors, weights, threads): weighted sum modulo 2^32 - 5"},
    {"field_encode", FAST(ef_py_field_encode), "field_encode(out, update, mask, clip, factor, threads)"},
    {"field_decode", FAST(ef_py_field_decode), "field_decode(out, words, mask, factor, threads)"},
    {"sq_norm", FAST(sq_norm), "sq_norm(update, scale, threads)"},
    {"checksum", FAST(checksum), "checksum(buffer, threads)"},
    {"delta", FAST(ef_py_delta), "delta(out, trained, base): out = trained - base, and its checksum"},
    {"observe", FAST(observe), "observe(mode, width, decay, count, state, ids, values, means)"},
    {"isas", isas, METH_NOARGS, "Available instruction sets, fastest first."},
    {"isa", isa, METH_NOARGS, "The instruction set in use."},
    {"set_isa", set_isa, METH_O, "Use this instruction set."},
    {"pool_size", pool_size, METH_NOARGS, "Number of threads in the pool."},
    {"close_pool", close_pool, METH_NOARGS, "Stop and join the threads of the pool."},
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
