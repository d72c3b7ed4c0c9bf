/* Python binding of the quantisation: rounds a float32 vector to an update's type. */
#include "binding.h"

/* quantize(out, update, scales, residual, left, weight, threads) -> squared norm, or None: see module.c */
PyObject *ef_py_quantize(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    enum { OUT, UPDATE, SCALES, RESIDUAL, LEFT, VIEWS };
    Py_buffer views[VIEWS] = {{0}};
    ef_quantization q = {0};
    double weight, norm = 0.0;
    int64_t n = 0, bytes;
    int ok = 0, failed = 0;
    (void)self;
    if (nargs != 7) return PyErr_Format(PyExc_TypeError, "quantize takes 7 arguments (got %zd)", nargs);
    const long threads = PyLong_AsLong(args[6]);
    if (threads == -1 && PyErr_Occurred()) return NULL;
    if (!number_of(args[5], &weight)) goto done;
    if (!flat(args[1], &views[UPDATE], 0) || !is_format(&views[UPDATE], 'f', 4)) goto done;
    n = views[UPDATE].len / 4;
    if (!flat(args[0], &views[OUT], 1) || (q.dtype = dtype_of(&views[OUT])) < 0) goto done;
    if (views[OUT].len != n * views[OUT].itemsize) goto done;
    if ((q.dtype == EF_I8) != (args[2] != Py_None)) goto done;
    for (int i = SCALES; i <= LEFT; i++) {
        if (args[i] == Py_None) continue;
        if (!flat(args[i], &views[i], i != RESIDUAL) || !is_format(&views[i], 'f', 4)) goto done;
        if (views[i].len != (i == SCALES ? (n + EF_SCALE_BLOCK - 1) / EF_SCALE_BLOCK : n) * 4) goto done;
    }
    /* Each element is read before it is written. An output may be the same array as an input, but not a part of it. */
    for (int i = OUT; i < VIEWS; i++)
        for (int j = i + 1; j < VIEWS; j++) {
            const int same = views[i].buf == views[j].buf && views[i].len == views[j].len;
            const int in_place = (i == RESIDUAL && j == LEFT) || (i == OUT && j == UPDATE);
            if (overlap(&views[i], &views[j]) && !(same && in_place) && !(i == UPDATE && j == RESIDUAL)) goto done;
        }
    q.x = views[UPDATE].buf, q.residual = views[RESIDUAL].buf, q.weight = (float)weight;
    q.out = views[OUT].buf, q.scales = views[SCALES].buf, q.left = views[LEFT].buf;
    ok = 1;
    bytes = views[OUT].len + views[UPDATE].len + views[RESIDUAL].len + views[LEFT].len;
    PyThreadState *state = leave_gil(bytes);
    failed = ef_quantize(&q, n, share(bytes, threads), &norm);
    take_gil(state);
done:
    release(views, VIEWS);
    if (failed) return PyErr_NoMemory();
    return ok ? PyFloat_FromDouble(norm) : Py_NewRef(Py_None);
}
