/* edgefl.lab._probe: measures the limits of memory bandwidth with which `edgefl bench` compares the kernels. It is a
 * separate extension with its own copy of the thread pool. */
#include "binding.h"

#define PIECE_BYTES (1 << 18)

typedef struct {
    const unsigned char *const *p;
    int64_t pieces, bytes;
    uint64_t all;
    uint64_t (*read)(const unsigned char *p, int64_t bytes);
} move_job;

/* Read memory as fast as possible, and return the exclusive or of its words and of the remaining bytes, so that the
 * compiler cannot remove the loads. There are four parallel streams, because one stream has too few loads in flight.
 * Compilers map the 64-byte vectors to instructions of the target. */
typedef uint64_t line __attribute__((vector_size(64)));
static inline __attribute__((always_inline)) uint64_t read_lines(const unsigned char *p, int64_t bytes)
{
    enum { STREAMS = 4, LINE = sizeof(line) };
    line sum[STREAMS] = {{0}};
    uint64_t all = 0;
    const int64_t stream = bytes / STREAMS / LINE * LINE;
    for (int64_t i = 0; i < stream; i += LINE)
        for (int j = 0; j < STREAMS; j++) {
            line x;
            memcpy(&x, p + stream * j + i, sizeof x);
            sum[j] ^= x;
        }
    for (int j = 0; j < STREAMS; j++)
        for (size_t l = 0; l < sizeof(line) / 8; l++) all ^= sum[j][l];
    for (int64_t i = STREAMS * stream; i < bytes; i++) all ^= p[i];
    return all;
}

static uint64_t read_generic(const unsigned char *p, int64_t bytes) { return read_lines(p, bytes); }
#if defined(__x86_64__)
#define FOR(set) __attribute__((target(set))) static uint64_t
FOR("avx2") read_avx2(const unsigned char *p, int64_t bytes) { return read_lines(p, bytes); }
FOR("avx512f") read_avx512(const unsigned char *p, int64_t bytes) { return read_lines(p, bytes); }
#endif

static void read_piece(void *context, int64_t piece)
{
    move_job *job = context;
    const int64_t at = piece % job->pieces * PIECE_BYTES, left = job->bytes - at;
    const uint64_t x = job->read(job->p[piece / job->pieces] + at, left < PIECE_BYTES ? left : PIECE_BYTES);
    __atomic_fetch_xor(&job->all, x, __ATOMIC_RELAXED);
}

/* read(buffers, threads): read every byte of buffers of equal length, and return the exclusive or
 * of the values of read_lines. */
static PyObject *read_all(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    Py_buffer views[64] = {{0}};
    const unsigned char *p[64];
    PyObject *buffers;
    Py_ssize_t count;
    move_job job = {p, 0, 0, 0, read_generic};
    int ok = 1;
    (void)self;
    if (nargs != 2) return PyErr_Format(PyExc_TypeError, "read takes 2 arguments (got %zd)", nargs);
    const long threads = PyLong_AsLong(args[1]);
    if ((threads == -1 && PyErr_Occurred()) || !(buffers = PySequence_Tuple(args[0]))) return NULL;
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2")) job.read = read_avx2;
    if (__builtin_cpu_supports("avx512f")) job.read = read_avx512;
#endif
    count = PyTuple_Size(buffers);
    ok = count <= 64;
    for (Py_ssize_t i = 0; ok && i < count; i++) {
        ok = flat(PyTuple_GetItem(buffers, i), &views[i], 0) && views[i].len == views[0].len;
        p[i] = views[i].buf;
    }
    if (ok) {
        job.bytes = views[0].len;
        job.pieces = (job.bytes + PIECE_BYTES - 1) / PIECE_BYTES;
        Py_BEGIN_ALLOW_THREADS
        ef_pool_run(read_piece, &job, job.pieces * count, share(job.bytes * count, threads));
        Py_END_ALLOW_THREADS
    }
    release(views, 64);
    Py_DECREF(buffers);
    if (!ok) return PyErr_Format(PyExc_ValueError, "read needs at most 64 flat buffers of equal length");
    return PyLong_FromUnsignedLongLong(job.all);
}

/* The triad of the STREAM benchmark, a = b + scalar * c: reads two vectors and writes one. */
typedef struct {
    ef_loose_float *a;
    const ef_loose_float *b, *c;
    int64_t n;
    float scalar;
} triad_job;

static void triad_piece(void *context, int64_t piece)
{
    const triad_job *job = context;
    const int64_t at = piece * (PIECE_BYTES / 4), end = at + PIECE_BYTES / 4;
    for (int64_t i = at; i < (end < job->n ? end : job->n); i++) job->a[i] = job->b[i] + job->scalar * job->c[i];
}

/* triad(a, b, c, scalar, threads) */
static PyObject *triad(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
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
        triad_job job = {views[0].buf, views[1].buf, views[2].buf, views[0].len / 4, (float)scalar};
        Py_BEGIN_ALLOW_THREADS
        const int64_t bytes = views[0].len;
        ef_pool_run(triad_piece, &job, (bytes + PIECE_BYTES - 1) / PIECE_BYTES, share(3 * bytes, threads));
        Py_END_ALLOW_THREADS
    }
    release(views, 3);
    return ok ? Py_NewRef(Py_None) : PyErr_Format(PyExc_ValueError, "triad needs three float32 buffers of equal length");
}

static PyMethodDef methods[] = {
    {"read", FAST(read_all), "read(buffers, threads)"},
    {"triad", FAST(triad), "triad(a, b, c, scalar, threads): a = b + scalar * c"},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot slots[] = {{0, NULL}};
static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_probe", "Memory bandwidth limits for benchmarks.", 0, methods, slots, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__probe(void) { return PyModuleDef_Init(&definition); }
