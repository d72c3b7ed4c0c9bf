/* For benchmarks and tests: the memory's limits, the instruction sets, the pool. */
#include "binding.h"

/* read(buffers, threads): read every byte of buffers of one length; returns their exclusive or. */
PyObject *ef_py_read(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    Py_buffer views[64] = {{0}};
    const unsigned char *p[64];
    PyObject *buffers;
    Py_ssize_t count;
    uint64_t x = 0;
    int ok = 1;
    (void)self;
    if (nargs != 2) return PyErr_Format(PyExc_TypeError, "read takes 2 arguments (got %zd)", nargs);
    const long threads = PyLong_AsLong(args[1]);
    if ((threads == -1 && PyErr_Occurred()) || !(buffers = PySequence_Tuple(args[0]))) return NULL;
    count = PyTuple_Size(buffers);
    ok = count <= 64;
    for (Py_ssize_t i = 0; ok && i < count; i++) {
        ok = flat(PyTuple_GetItem(buffers, i), &views[i], 0) && views[i].len == views[0].len;
        p[i] = views[i].buf;
    }
    if (ok) {
        Py_BEGIN_ALLOW_THREADS
        x = ef_read(p, count, views[0].len, share(views[0].len * count, threads));
        Py_END_ALLOW_THREADS
    }
    release(views, 64);
    Py_DECREF(buffers);
    if (!ok) return PyErr_Format(PyExc_ValueError, "read needs at most 64 flat buffers of one length");
    return PyLong_FromUnsignedLongLong(x);
}

/* copy(to, from, threads) */
PyObject *ef_py_copy(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    Py_buffer views[2] = {{0}};
    int ok;
    (void)self;
    if (nargs != 3) return PyErr_Format(PyExc_TypeError, "copy takes 3 arguments (got %zd)", nargs);
    const long threads = PyLong_AsLong(args[2]);
    if (threads == -1 && PyErr_Occurred()) return NULL;
    ok = flat(args[0], &views[0], 1) && flat(args[1], &views[1], 0);
    ok = ok && views[0].len == views[1].len && !overlap(&views[0], &views[1]);
    if (ok) {
        Py_BEGIN_ALLOW_THREADS
        ef_copy(views[0].buf, views[1].buf, views[0].len, share(2 * views[0].len, threads));
        Py_END_ALLOW_THREADS
    }
    release(views, 2);
    return ok ? Py_NewRef(Py_None) : PyErr_Format(PyExc_ValueError, "copy needs two flat buffers of one length");
}

/* triad(a, b, c, scalar, threads) */
PyObject *ef_py_triad(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    Py_buffer views[3] = {{0}};
    double scalar;
    int ok = 1;
    (void)self;
    if (nargs != 5) return PyErr_Format(PyExc_TypeError, "triad takes 5 arguments (got %zd)", nargs);
    const long threads = PyLong_AsLong(args[4]);
    if (threads == -1 && PyErr_Occurred()) return NULL;
    for (int i = 0; ok && i < 3; i++)
        ok = flat(args[i], &views[i], i == 0) && is_format(&views[i], 'f', 4) && views[i].len == views[0].len;
    ok = ok && !overlap(&views[0], &views[1]) && !overlap(&views[0], &views[2]) && number_of(args[3], &scalar);
    if (ok) {
        Py_BEGIN_ALLOW_THREADS
        ef_triad(views[0].buf, views[1].buf, views[2].buf, (float)scalar, views[0].len / 4,
                 share(3 * views[0].len, threads));
        Py_END_ALLOW_THREADS
    }
    release(views, 3);
    return ok ? Py_NewRef(Py_None) : PyErr_Format(PyExc_ValueError, "triad needs three float32 buffers of one length");
}

PyObject *ef_py_isas(PyObject *self, PyObject *unused)
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

PyObject *ef_py_isa(PyObject *self, PyObject *unused)
{
    (void)self, (void)unused;
    return PyUnicode_FromString(ef_isa_now()->name);
}

PyObject *ef_py_set_isa(PyObject *self, PyObject *name)
{
    const char *text = PyUnicode_AsUTF8AndSize(name, NULL);
    (void)self;
    if (!text) return NULL;
    if (!ef_isa_set(text))
        return PyErr_Format(PyExc_ValueError, "instruction set '%s' is not there on this machine", text);
    return Py_NewRef(Py_None);
}

PyObject *ef_py_pool_size(PyObject *self, PyObject *unused)
{
    (void)self, (void)unused;
    return PyLong_FromLong(ef_pool_size());
}

PyObject *ef_py_close_pool(PyObject *self, PyObject *unused)
{
    (void)self, (void)unused;
    Py_BEGIN_ALLOW_THREADS
    ef_pool_close();
    Py_END_ALLOW_THREADS
    return Py_NewRef(Py_None);
}
