/* edgefl.host._code: small programs of five classes of code. A calibration times them to compare this host with devices
 * (edgefl/host/code_operations.py). Each function does a given amount of work and returns a checksum.
 *
 *   integer  decode a stream like LZMA's: an adaptive binary range decoder, which writes literals and matches
 *   memory   find matches as LZMA's encoder does: binary trees of positions in a window that exceeds the caches
 *   crypto   encrypt with chained rounds of AES-256: with AES instructions if the CPU has them, otherwise with tables
 *   division search for the primes up to 10,000 with 64-bit division
 *   floats   solve the five-body problem in double precision
 *
 * `spin` is not a class of code: it keeps a core busy (edgefl/host/awake.py).
 */
#include "binding.h"

#include <math.h>
#include <stdlib.h>
#if defined(__x86_64__)
#include <wmmintrin.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <arm_neon.h>
#include <sys/auxv.h>
#endif

static uint32_t random_state = 1;
static uint32_t next_random(void) /* xorshift32 */
{
    random_state ^= random_state << 13;
    random_state ^= random_state >> 17;
    return random_state ^= random_state << 5;
}

/* ---- integer ---- */

enum { DICTIONARY = 1 << 20, MODELS = 1 << 16, PROBABILITY_BITS = 11, STREAM = 1 << 16 };

typedef struct {
    uint32_t range, code, at;
    const unsigned char *stream;
    uint16_t models[MODELS];
} range_decoder;

static inline int decode_bit(range_decoder *d, uint16_t *model)
{
    if (d->range < 1u << 24) {
        d->range <<= 8;
        d->code = d->code << 8 | d->stream[d->at++ % STREAM];
    }
    const uint32_t bound = (d->range >> PROBABILITY_BITS) * *model;
    if (d->code < bound) {
        d->range = bound;
        *model += ((1 << PROBABILITY_BITS) - *model) >> 5;
        return 0;
    }
    d->range -= bound;
    d->code -= bound;
    *model -= *model >> 5;
    return 1;
}

static uint32_t decode_tree(range_decoder *d, uint16_t *models, int bits)
{
    uint32_t symbol = 1;
    for (int i = 0; i < bits; i++) symbol = symbol << 1 | (uint32_t)decode_bit(d, models + symbol);
    return symbol - (1u << bits);
}

/* Decode `bytes` bytes: literals in the context of the previous byte, and matches of 2 to 17 bytes. */
static uint64_t run_integer(int64_t bytes)
{
    static unsigned char stream[STREAM], dictionary[DICTIONARY];
    static range_decoder d;
    uint64_t sum = 0;
    random_state = 1;
    for (int i = 0; i < STREAM; i++) stream[i] = (unsigned char)(next_random() >> 24);
    d = (range_decoder){.range = UINT32_MAX, .code = next_random(), .stream = stream};
    for (int i = 0; i < MODELS; i++) d.models[i] = 1 << (PROBABILITY_BITS - 1);
    uint16_t *literals = d.models, *is_match = literals + (1 << 14), *lengths = is_match + 256,
             *slots = lengths + 16, *low = slots + 64;
    unsigned state = 0;
    for (int64_t at = 0; at < bytes;) {
        const unsigned before = dictionary[(at - 1) & (DICTIONARY - 1)];
        if (!decode_bit(&d, is_match + state)) {
            dictionary[at & (DICTIONARY - 1)] = (unsigned char)decode_tree(&d, literals + (before >> 2) * 256, 8);
            sum += dictionary[at++ & (DICTIONARY - 1)];
            state = state << 1 & 255;
            continue;
        }
        const uint32_t length = 2 + decode_tree(&d, lengths, 4), slot = decode_tree(&d, slots, 4);
        uint32_t distance = 1u << slot;
        for (uint32_t bit = 0; bit < slot; bit++) distance |= (uint32_t)decode_bit(&d, low + slot * 16 + bit) << bit;
        for (uint32_t i = 0; i < length; i++, at++)
            dictionary[at & (DICTIONARY - 1)] = dictionary[(at - distance) & (DICTIONARY - 1)];
        state = (state << 1 | 1) & 255;
    }
    return sum;
}

/* ---- memory ---- */

enum { WINDOW = 1 << 22, HASHES = 1 << 20, DEPTH = 16, LONGEST = 32 };

typedef struct {
    unsigned char data[WINDOW + LONGEST];
    uint32_t heads[HASHES], sons[2 * (size_t)WINDOW];
    uint32_t at;
} match_finder;

/* Create the text in which matches are found: random letters and copies of earlier text, which give the trees long
 * branches. */
static match_finder *make_finder(void)
{
    match_finder *f = calloc(1, sizeof *f);
    random_state = 1;
    for (uint32_t i = 0; f && i < WINDOW + LONGEST;) {
        const uint32_t word = next_random(), length = 4 + (word >> 8) % 12, from = i ? word % i : 0;
        for (uint32_t j = 0; j < length && i < WINDOW + LONGEST; j++, i++)
            f->data[i] = i > 64 && word >> 31 ? f->data[from + j] : (unsigned char)(next_random() >> 26);
    }
    return f;
}

/* Insert a position into the tree for its hash, and return the length of its longest match (bt4 of the LZMA SDK). */
static uint32_t insert(match_finder *f, uint32_t now)
{
    const unsigned char *here = f->data + (now & (WINDOW - 1));
    uint32_t word, longest = 0, lengths[2] = {0, 0};
    memcpy(&word, here, 4);
    uint32_t *head = f->heads + (word * 2654435761u >> 12), other = *head;
    uint32_t *ends[2] = {f->sons + 2 * (size_t)(now & (WINDOW - 1)), f->sons + 2 * (size_t)(now & (WINDOW - 1)) + 1};
    *head = now;
    for (int depth = 0; depth < DEPTH && other && now - other < WINDOW; depth++) {
        uint32_t *pair = f->sons + 2 * (size_t)(other & (WINDOW - 1));
        const unsigned char *there = f->data + (other & (WINDOW - 1));
        uint32_t length = lengths[0] < lengths[1] ? lengths[0] : lengths[1];
        while (length < LONGEST && here[length] == there[length]) length++;
        longest = length > longest ? length : longest;
        if (length == LONGEST) {
            *ends[0] = pair[0];
            *ends[1] = pair[1];
            return longest;
        }
        const int smaller = there[length] < here[length];
        *ends[!smaller] = other;
        ends[!smaller] = pair + smaller;
        other = pair[smaller];
        lengths[!smaller] = length;
    }
    *ends[0] = *ends[1] = 0;
    return longest;
}

/* Insert `positions` more positions into a full window, which stays allocated. Return 0 if memory is exhausted. */
static uint64_t run_memory(int64_t positions)
{
    static match_finder *finder;
    uint64_t sum = 1;
    if (!finder) {
        if (!(finder = make_finder())) return 0;
        for (int i = 0; i < WINDOW; i++) insert(finder, ++finder->at);
    }
    for (int64_t i = 0; i < positions; i++) sum += insert(finder, ++finder->at);
    return sum;
}

/* ---- crypto ---- */

#if defined(__x86_64__)
static int has_aes(void) { return __builtin_cpu_supports("aes"); }
__attribute__((target("aes"))) static uint64_t aes_instructions(int64_t blocks)
{
    __m128i keys[15], block = _mm_set1_epi32(1);
    for (int i = 0; i < 15; i++) keys[i] = _mm_set1_epi32((int)(i * 2654435761u));
    for (int64_t b = 0; b < blocks; b++) {
        block = _mm_xor_si128(block, keys[0]);
        for (int i = 1; i < 14; i++) block = _mm_aesenc_si128(block, keys[i]);
        block = _mm_aesenclast_si128(block, keys[14]);
    }
    return (uint64_t)_mm_cvtsi128_si64(block);
}
#elif defined(__aarch64__) && defined(__linux__)
static int has_aes(void) { return (getauxval(AT_HWCAP) >> 3) & 1; }
__attribute__((target("+crypto"))) static uint64_t aes_instructions(int64_t blocks)
{
    uint8x16_t keys[15], block = vdupq_n_u8(1);
    for (int i = 0; i < 15; i++) keys[i] = vdupq_n_u8((uint8_t)(i * 37));
    for (int64_t b = 0; b < blocks; b++) {
        for (int i = 0; i < 13; i++) block = vaesmcq_u8(vaeseq_u8(block, keys[i]));
        block = veorq_u8(vaeseq_u8(block, keys[13]), keys[14]);
    }
    return vgetq_lane_u64(vreinterpretq_u64_u8(block), 0);
}
#else
static int has_aes(void) { return 0; }
static uint64_t aes_instructions(int64_t blocks) { return (uint64_t)blocks; }
#endif

/* Do the table lookups of an AES without AES instructions. The table has random values, which take the same time. */
static uint64_t aes_tables(int64_t blocks)
{
    static uint32_t table[256];
    uint32_t block[4] = {1, 2, 3, 4}, next[4];
    random_state = 1;
    for (int i = 0; i < 256; i++) table[i] = next_random();
    for (int64_t b = 0; b < blocks * 14; b++) {
        for (int i = 0; i < 4; i++) {
            const uint32_t x = table[block[i] & 255], y = table[block[(i + 1) & 3] >> 8 & 255],
                           z = table[block[(i + 2) & 3] >> 16 & 255], w = table[block[(i + 3) & 3] >> 24];
            next[i] = x ^ (y << 8 | y >> 24) ^ (z << 16 | z >> 16) ^ (w << 24 | w >> 8) ^ (uint32_t)b;
        }
        memcpy(block, next, sizeof block);
    }
    return block[0] | (uint64_t)block[1] << 32;
}

/* Encrypt `bytes` bytes in blocks of 16 bytes, each of which is chained to the previous block. */
static uint64_t run_crypto(int64_t bytes) { return has_aes() ? aes_instructions(bytes / 16) : aes_tables(bytes / 16); }

/* ---- division ---- */

enum { LARGEST = 10000 };

/* Count the primes up to LARGEST, `searches` times. Each number is divided by 2, 3, … up to its square root, until a
 * division leaves no remainder. */
static uint64_t run_division(int64_t searches)
{
    volatile uint64_t largest = LARGEST; /* volatile, so that the compiler cannot replace the 64-bit divisions */
    uint64_t primes = 0;
    for (int64_t i = 0; i < searches; i++)
        for (uint64_t number = 3; number < largest; number++) {
            const uint64_t root = (uint64_t)sqrt((double)number);
            uint64_t divisor = 2;
            while (divisor <= root && number % divisor) divisor++;
            primes += divisor > root;
        }
    return primes;
}

/* ---- float ---- */

typedef struct {
    double x[3], v[3], mass;
} body;

/* Advance five bodies by `steps` steps. Their positions, speeds and masses are similar to those of the Sun and its
 * planets. */
static uint64_t run_floats(int64_t steps)
{
    body bodies[5];
    for (int i = 0; i < 5; i++)
        bodies[i] = (body){{5.0 * i, -3.0 * i, 0.3 * i}, {0.6, 2.8 / (i + 1), 0.02 * i}, i ? 0.01 / i : 39.5};
    for (int64_t step = 0; step < steps; step++) {
        for (int i = 0; i < 5; i++)
            for (int j = i + 1; j < 5; j++) {
                body *a = bodies + i, *b = bodies + j;
                const double dx = a->x[0] - b->x[0], dy = a->x[1] - b->x[1], dz = a->x[2] - b->x[2];
                const double squared = dx * dx + dy * dy + dz * dz, factor = 0.001 / (squared * sqrt(squared));
                a->v[0] -= dx * b->mass * factor, a->v[1] -= dy * b->mass * factor, a->v[2] -= dz * b->mass * factor;
                b->v[0] += dx * a->mass * factor, b->v[1] += dy * a->mass * factor, b->v[2] += dz * a->mass * factor;
            }
        for (int i = 0; i < 5; i++)
            for (int k = 0; k < 3; k++) bodies[i].x[k] += 0.001 * bodies[i].v[k];
    }
    return (uint64_t)(int64_t)(1e6 * bodies[0].x[0]);
}

/* ---- spin ---- */

/* Execute `hints` spin-wait hints, which leave most of the core to its other hardware thread. */
static uint64_t run_spin(int64_t hints)
{
    for (int64_t hint = 0; hint < hints; hint++) {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#elif defined(__aarch64__)
        __asm__ __volatile__("yield");
#else
        __asm__ __volatile__("" ::: "memory");
#endif
    }
    return (uint64_t)hints;
}

/* ---- Python ---- */

static PyObject *run(PyObject *amount, uint64_t (*work)(int64_t))
{
    uint64_t found = 0;
    const long long count = PyLong_AsLongLong(amount);
    if (count == -1 && PyErr_Occurred()) return NULL;
    if (count < 1) return PyErr_Format(PyExc_ValueError, "the amount of work must be above 0 (got %lld)", count);
    Py_BEGIN_ALLOW_THREADS
    found = work(count);
    Py_END_ALLOW_THREADS
    return PyLong_FromUnsignedLongLong(found);
}

#define RUN(name) \
    static PyObject *name(PyObject *self, PyObject *amount) { return (void)self, run(amount, run_##name); }
RUN(integer)
RUN(memory)
RUN(crypto)
RUN(division)
RUN(floats)
RUN(spin)

static PyObject *aes(PyObject *self, PyObject *none)
{
    (void)self, (void)none;
    return PyBool_FromLong(has_aes());
}

static PyMethodDef methods[] = {
    {"integer", integer, METH_O, "integer(bytes): decode this number of bytes"},
    {"memory", memory, METH_O, "memory(positions): find the matches of this number of positions"},
    {"crypto", crypto, METH_O, "crypto(bytes): encrypt this number of bytes"},
    {"division", division, METH_O, "division(searches): count the primes up to 10,000 this number of times"},
    {"floats", floats, METH_O, "floats(steps): advance five bodies by this number of steps"},
    {"spin", spin, METH_O, "spin(hints): execute this number of spin-wait hints"},
    {"aes", aes, METH_NOARGS, "True if the CPU has AES instructions"},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot slots[] = {{0, NULL}};
static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_code", "Programs that represent classes of code.", 0, methods, slots, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__code(void) { return PyModuleDef_Init(&definition); }
