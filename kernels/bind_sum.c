/* Python bindings of the weighted sum, alone or fused with a server optimiser's step. */
#include "binding.h"

#define SMALL 16
#define CONSTANTS 6
enum { OUT, BASE, NORMS, SUMS, OLD, NEW = OLD + 2, FIRST = NEW + 2 };
enum { SUM_ARGS = 8, STEP_ARGS = 12 };

/* Convert the arguments of a step (kind, constants, old, new), and store its vectors in views, from views[OLD] on. */
static int step_of(PyObject *const *args, int64_t n, ef_step *step, Py_buffer *views)
{
    double c[CONSTANTS];
    PyObject *constants = items_of(args[1]), *old = items_of(args[2]), *new = items_of(args[3]);
    const long kind = PyLong_AsLong(args[0]);
    int ok = constants && old && new && kind >= 0 && kind < EF_OPTIMIZERS;
    const Py_ssize_t vectors = kind == EF_MOMENTUM ? 1 : 2;
    PyErr_Clear();
    ok = ok && PyTuple_Size(constants) == CONSTANTS;
    ok = ok && PyTuple_Size(old) == vectors && PyTuple_Size(new) == vectors;
    for (int i = 0; ok && i < CONSTANTS; i++) ok = number_of(PyTuple_GetItem(constants, i), &c[i]);
    for (Py_ssize_t i = 0; ok && i < vectors; i++)
        ok = is_floats(PyTuple_GetItem(old, i), &views[OLD + i], 0, n) &&
             is_floats(PyTuple_GetItem(new, i), &views[NEW + i], 1, n);
    if (ok)
        *step = (ef_step){(int)kind, (float)c[0], (float)c[1], (float)c[2], (float)c[3], (float)c[4], (float)c[5],
                          views[OUT].buf, views[NEW].buf, views[NEW + 1].buf,
                          views[BASE].buf, views[OLD].buf, views[OLD + 1].buf};
    Py_XDECREF(constants);
    Py_XDECREF(old);
    Py_XDECREF(new);
    return ok;
}

/* Return 1 if an output overlaps an input or another output. In a sum without a step, base may be the same as out. */
static int collides(const Py_buffer *views, Py_ssize_t count, int step)
{
    static const int written[] = {OUT, NEW, NEW + 1};
    for (int i = 0; i < (step ? 3 : 1); i++)
        for (Py_ssize_t j = 0; j < FIRST + 2 * count; j++) {
            if (j == written[i] || j == NORMS || j == SUMS || !overlap(&views[written[i]], &views[j])) continue;
            if (j == BASE && !step && views[BASE].buf == views[OUT].buf) continue;
            return 1;
        }
    return 0;
}

/* weighted_sum(out, base, updates, weights, scales, norms, checksums, threads) -> True, or None: see module.c
 * weighted_step has the same arguments, followed by kind, constants, old, new. */
PyObject *ef_py_weighted_sum(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    Py_buffer few_views[FIRST + 2 * SMALL] = {{0}}, *views = few_views;
    ef_update few[SMALL], *u = few;
    ef_step made, *step = nargs == STEP_ARGS ? &made : NULL;
    PyObject *updates = NULL, *weights = NULL, *scales = NULL, *result = NULL;
    Py_ssize_t count = 0;
    int64_t n, bytes;
    int ok = 0, failed = 0;
    long threads;
    (void)self;
    if (nargs != SUM_ARGS && nargs != STEP_ARGS)
        return PyErr_Format(PyExc_TypeError, "a weighted sum takes 8 arguments, a step 12 (got %zd)", nargs);
    threads = PyLong_AsLong(args[7]);
    if (threads == -1 && PyErr_Occurred()) return NULL;
    if (!(updates = items_of(args[2])) || !(weights = items_of(args[3]))) goto done;
    if (args[4] != Py_None && !(scales = items_of(args[4]))) goto done;
    const Py_ssize_t given = PyTuple_Size(updates);
    if (PyTuple_Size(weights) != given || (scales && PyTuple_Size(scales) != given)) goto done;
    count = given; /* only now, because `done` releases the views of this number of updates */
    if (count > SMALL) {
        views = PyMem_Calloc((size_t)(FIRST + 2 * count), sizeof *views);
        u = PyMem_Malloc((size_t)count * sizeof *u);
        if (!views || !u) {
            PyErr_NoMemory();
            failed = 1;
            goto done;
        }
    }
    if (!is_floats(args[0], &views[OUT], 1, -1)) goto done;
    if (!flat(args[5], &views[NORMS], 1) || !is_format(&views[NORMS], 'd', 8)) goto done;
    if (views[NORMS].len != count * 8) goto done;
    if (args[6] != Py_None) {
        if (!flat(args[6], &views[SUMS], 1) || !is_uint64(&views[SUMS])) goto done;
        if (views[SUMS].len != count * 8) goto done;
    }
    n = views[OUT].len / 4;
    if ((step || args[1] != Py_None) && !is_floats(args[1], &views[BASE], 0, n)) goto done;
    if (step && !step_of(args + SUM_ARGS, n, step, views)) goto done;
    bytes = n * 8 + views[OLD].len * 2 + views[OLD + 1].len * 2;
    for (Py_ssize_t j = 0; j < count; j++) {
        double weight;
        PyObject *scale = scales ? PyTuple_GetItem(scales, j) : NULL;
        Py_buffer *view = &views[FIRST + 2 * j];
        if (!number_of(PyTuple_GetItem(weights, j), &weight)) goto done;
        u[j].weight = (float)weight;
        if (!update_of(PyTuple_GetItem(updates, j), scale, n, &u[j], view, view + 1)) goto done;
        bytes += view->len;
    }
    if (collides(views, count, step != NULL)) goto done;
    ok = 1;
    PyThreadState *state = leave_gil(bytes);
    failed = ef_weighted_sum(views[OUT].buf, step ? NULL : views[BASE].buf, u, count, n, views[NORMS].buf,
                             views[SUMS].buf, step, share(bytes, threads));
    take_gil(state);
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
