/* Measures the time that a device without Python takes for each class of operation. Prints JSON to stdout.
 *
 *     make measure-device CC=aarch64-linux-gnu-gcc    builds a static program to copy to the device
 *     measure-device [--quick]                        takes half a minute, or a few seconds
 *
 * The classes are those of edgefl.learning.operations.StepWork. `edgefl profiles fit` reads the result like that of
 * `edgefl measure`. The result's runtime is "c", because the rates are those of the loops in this file. All
 * cores are used unless OMP_NUM_THREADS sets another number. The "value" of each part is one of the numbers that it
 * computed, which the tests check.
 */
#define _POSIX_C_SOURCE 200809L
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/utsname.h>
#include <time.h>
#include <unistd.h>
#ifdef _OPENMP
#include <omp.h>
#endif

enum { FLOATS = 1 << 22, MAX_STEPS = 200, COLUMNS = 512, DEPTH = 128 };

typedef struct {
  int channels, outputs, size, kernel, stride; /* the image has size × size pixels, and is padded to keep its size */
} Shape;

static float *in, *weight, *out, *scratch;

static double seconds(clockid_t clock) {
  struct timespec now;
  clock_gettime(clock, &now);
  return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* c[m × n] = a[m × k] · b[k × n], in blocks that fit in the caches. Each load of b is used for four rows. */
static void gemm(int m, int n, int k, const float *a, const float *b, float *c) {
#pragma omp parallel for schedule(dynamic)
  for (int i = 0; i < m; i += 4) {
    const int rows = m - i < 4 ? m - i : 4;
    memset(c + (size_t)i * n, 0, sizeof(float) * (size_t)rows * n);
    for (int j0 = 0; j0 < n; j0 += COLUMNS)
      for (int k0 = 0; k0 < k; k0 += DEPTH) {
        const int j1 = j0 + COLUMNS < n ? j0 + COLUMNS : n, k1 = k0 + DEPTH < k ? k0 + DEPTH : k;
        for (int p = k0; p < k1; p++) {
          const float *row = b + (size_t)p * n;
          float *restrict c0 = c + (size_t)i * n, *restrict c1 = c0 + n, *restrict c2 = c1 + n,
                *restrict c3 = c2 + n;
          const float *a0 = a + (size_t)i * k + p;
          if (rows == 4) {
            const float x = a0[0], y = a0[k], z = a0[2 * (size_t)k], w = a0[3 * (size_t)k];
            for (int j = j0; j < j1; j++) {
              c0[j] += x * row[j];
              c1[j] += y * row[j];
              c2[j] += z * row[j];
              c3[j] += w * row[j];
            }
          } else
            for (int r = 0; r < rows; r++)
              for (int j = j0; j < j1; j++) c0[(size_t)r * n + j] += a0[(size_t)r * k] * row[j];
        }
      }
  }
}

/* Unfold the image (im2col). Tap t of output position p is the image coordinate p · stride + t − kernel / 2. */
static void columns(Shape s) {
  const int side = s.size / s.stride, taps = s.kernel * s.kernel;
#pragma omp parallel for
  for (int row = 0; row < s.channels * taps; row++) {
    const float *image = in + (size_t)(row / taps) * s.size * s.size;
    const int dy = row % taps / s.kernel - s.kernel / 2, dx = row % s.kernel - s.kernel / 2;
    for (int y = 0; y < side; y++)
      for (int x = 0; x < side; x++) {
        const int v = y * s.stride + dy, u = x * s.stride + dx;
        const int inside = v >= 0 && v < s.size && u >= 0 && u < s.size;
        scratch[((size_t)row * side + y) * side + x] = inside ? image[v * s.size + u] : 0;
      }
  }
}

static void convolution(Shape s) {
  const int side = s.size / s.stride, taps = s.kernel * s.kernel;
  if (s.kernel > 1) columns(s);
  gemm(s.outputs, side * side, s.channels * taps, weight, s.kernel > 1 ? scratch : in, out);
}

/* For one plane and one tap, add w · from, shifted by (dy, dx), to `to`. With `gradient`, return the sum of to · from
 * instead. */
static float tap(int size, int dy, int dx, const float *from, float *to, float w, int gradient) {
  float sum = 0;
  const int x0 = dx < 0 ? -dx : 0, x1 = dx > 0 ? size - dx : size;
  for (int y = dy < 0 ? -dy : 0; y < (dy > 0 ? size - dy : size); y++) {
    const float *restrict f = from + (y + dy) * size + dx;
    float *restrict t = to + y * size;
    if (gradient)
      for (int x = x0; x < x1; x++) sum += t[x] * f[x];
    else
      for (int x = x0; x < x1; x++) t[x] += w * f[x];
  }
  return sum;
}

static void depthwise(Shape s, int backward) {
  const int taps = s.kernel * s.kernel, plane = s.size * s.size;
#pragma omp parallel for
  for (int c = 0; c < s.channels; c++) {
    float *to = out + (size_t)c * plane;
    memset(to, 0, sizeof(float) * (size_t)plane);
    for (int t = 0; t < taps; t++) {
      const int dy = t / s.kernel - s.kernel / 2, dx = t % s.kernel - s.kernel / 2;
      const float *from = in + (size_t)c * plane;
      tap(s.size, backward ? -dy : dy, backward ? -dx : dx, from, to, weight[c * taps + t], 0);
      if (backward) scratch[c * taps + t] = tap(s.size, dy, dx, from, (float *)from, 0, 1);
    }
  }
}

static void forward(Shape s) { depthwise(s, 0); }
static void backward(Shape s) { depthwise(s, 1); }

/* Multiply a matrix of outputs × channels by a matrix of channels × size. */
static void matmul(Shape s) { gemm(s.outputs, s.size, s.channels, in, weight, out); }

/* Run an LSTM layer without sigmoids: `size` steps, `channels` inputs, `outputs` units, batch size `stride`. */
static void recurrent(Shape s) {
  const int both = s.channels + s.outputs, gates = 4 * s.outputs;
  for (int step = 0; step < s.size; step++) {
    gemm(s.stride, gates, both, in, weight, out);
    for (int b = 0; b < s.stride; b++)
      for (int o = 0; o < s.outputs; o++) {
        const float *g = out + (size_t)b * gates + o;
        scratch[b * s.outputs + o] = g[0] * g[s.outputs] + g[2 * s.outputs] * g[3 * s.outputs];
      }
  }
}

static void elementwise(Shape s) {
#pragma omp parallel for
  for (int i = 0; i < s.size; i++) out[i] = in[i] + scratch[i] > 0 ? in[i] + scratch[i] : 0;
}

static void norm(Shape s) {
  const int row = s.size / s.channels;
#pragma omp parallel for
  for (int c = 0; c < s.channels; c++) {
    const float *x = in + (size_t)c * row;
    float *y = out + (size_t)c * row, sum = 0, squares = 0;
    for (int i = 0; i < row; i++) {
      sum += x[i];
      squares += x[i] * x[i];
    }
    const float mean = sum / row, scale = 1 / (squares / row + 1);
    for (int i = 0; i < row; i++) y[i] = (x[i] - mean) * scale;
  }
}

static void pool(Shape s) {
  const int side = s.size / 2;
#pragma omp parallel for
  for (int row = 0; row < s.channels * side; row++)
    for (int x = 0; x < side; x++) {
      const float *at = in + (size_t)row * 2 * s.size + 2 * x;
      const float upper = at[0] > at[1] ? at[0] : at[1], *low = at + s.size;
      const float lower = low[0] > low[1] ? low[0] : low[1];
      out[row * side + x] = upper > lower ? upper : lower;
    }
}

/* Copy a matrix and transpose it. */
static void copy(Shape s) {
#pragma omp parallel for
  for (int y = 0; y < s.size; y++)
    for (int x = 0; x < s.size; x++) out[(size_t)y * s.size + x] = in[(size_t)x * s.size + y];
}

static void update(Shape s) {
#pragma omp parallel for
  for (int i = 0; i < s.size; i++) {
    scratch[i] = 0.9f * scratch[i] + in[i];
    out[i] -= 1e-9f * scratch[i];
  }
}

static void tiny(Shape s) {
  static void (*volatile call)(Shape) = elementwise;
  for (int i = 0; i < s.channels; i++) call((Shape){.size = 8});
}

typedef struct {
  const char *name;
  void (*step)(Shape);
  Shape shape;
  const char *flop, *bytes; /* class of the part's operations, and class of its memory traffic */
} Part;

static const Part PARTS[] = {
    {"conv/28", convolution, {128, 128, 28, 3, 1}, "conv_flop", "conv_bytes"},
    {"conv/7", convolution, {512, 512, 7, 3, 1}, "conv_flop", "conv_bytes"},
    {"conv/narrow", convolution, {16, 16, 112, 3, 1}, "conv_flop", "conv_bytes"},
    {"conv/stem", convolution, {3, 48, 224, 3, 2}, "thin_flop", "conv_bytes"},
    {"pointwise/56", convolution, {64, 256, 56, 1, 1}, "pointwise_flop", "conv_bytes"},
    {"pointwise/14", convolution, {256, 1024, 14, 1, 1}, "pointwise_flop", "conv_bytes"},
    {"pointwise/narrow", convolution, {16, 96, 112, 1, 1}, "pointwise_flop", "conv_bytes"},
    {"depthwise/112", forward, {32, 1, 112, 3, 1}, "depthwise_flop", "conv_bytes"},
    {"depthwise/14", forward, {384, 1, 14, 7, 1}, "depthwise_flop", "conv_bytes"},
    {"depthwise/112 backward", backward, {32, 1, 112, 3, 1}, "depthwise_backward_flop", "conv_bytes"},
    {"depthwise/14 backward", backward, {384, 1, 14, 7, 1}, "depthwise_backward_flop", "conv_bytes"},
    {"matmul/wide", matmul, {384, 197, 1536, 0, 0}, "matmul_flop", "matmul_bytes"},
    {"matmul/one row", matmul, {1024, 1, 2048, 0, 0}, "matmul_flop", "matmul_bytes"},
    {"memory/elementwise", elementwise, {0, 0, FLOATS, 0, 0}, "", "elementwise_bytes"},
    {"memory/norm", norm, {64, 0, FLOATS, 0, 0}, "", "norm_bytes"},
    {"memory/pool", pool, {64, 0, 224, 0, 0}, "", "pool_bytes"},
    {"memory/copy", copy, {0, 0, 2048, 0, 0}, "", "copy_bytes"},
    {"calls/tiny", tiny, {20000, 0, 0, 0, 0}, "", ""},
    {"update/linear", update, {0, 0, FLOATS, 0, 0}, "", ""},
    {"recurrent/lstm", recurrent, {64, 256, 40, 0, 16}, "recurrent_flop", "elementwise_bytes"},
};

/* Print the amounts of work of a part as JSON. They are computed by formulas, which tests/unit/test_measure_device.py
 * compares with the work that edgefl counts for torch. */
static void print_work(const Part *part) {
  const Shape s = part->shape;
  const double size = s.size, c = s.channels, o = s.outputs, k = s.kernel;
  double flop = 0, moved = 0, calls = 1, side = s.stride ? size / s.stride : 0;
  if (part->step == convolution) {
    flop = 2 * o * c * k * k * side * side;
    moved = c * size * size + o * c * k * k + o * side * side;
  } else if (part->step == forward) {
    flop = 2 * c * k * k * size * size;
    moved = 2 * c * size * size + c * k * k;
  } else if (part->step == backward) { /* reads the gradient, the input and the weight; writes two gradients */
    flop = 4 * c * k * k * size * size;
    moved = 3 * c * size * size + 2 * c * k * k;
  } else if (part->step == matmul) {
    flop = 2 * o * c * size;
    moved = o * c + c * size + o * size;
  } else if (part->step == recurrent) {
    flop = 2 * size * s.stride * 4 * o * (c + o);
    moved = size * s.stride * 5 * o;
    calls = 2 * size;
  } else if (part->step == elementwise)
    moved = 3 * size;
  else if (part->step == norm)
    moved = 2 * size;
  else if (part->step == pool)
    moved = c * size * size * 1.25;
  else if (part->step == copy)
    moved = 2 * size * size;
  else if (part->step == tiny)
    calls = c;
  printf("\"work\": {\"calls\": %.0f", calls);
  if (*part->flop) printf(", \"%s\": %.0f", part->flop, flop);
  if (*part->bytes) printf(", \"%s\": %.0f", part->bytes, 4 * moved);
  if (part->step == forward) printf(", \"depthwise_planes\": %.0f", c);
  if (part->step == backward) printf(", \"depthwise_planes\": %.0f", 2 * c);
  if (part->step == update) printf(", \"parameters\": %.0f", size);
  printf("}");
}

static int ascending(const void *a, const void *b) {
  const double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}

static void fill(void) {
  for (int i = 0; i < FLOATS; i++) {
    in[i] = 1;
    weight[i] = 0.5f;
    out[i] = scratch[i] = 0;
  }
}

/* Run steps until budget_s seconds have passed, but at least `least` and at most MAX_STEPS steps. Print the median
 * wall time and CPU time. */
static void measure(const Part *part, int least, double budget_s) {
  static double wall[MAX_STEPS], cpu[MAX_STEPS];
  int steps = 0;
  fill();
  part->step(part->shape);
  const double end = seconds(CLOCK_MONOTONIC) + budget_s, value = out[part->shape.size / 2];
  while (steps < least || (steps < MAX_STEPS && seconds(CLOCK_MONOTONIC) < end)) {
    const double at = seconds(CLOCK_MONOTONIC), cpu_at = seconds(CLOCK_PROCESS_CPUTIME_ID);
    part->step(part->shape);
    wall[steps] = seconds(CLOCK_MONOTONIC) - at;
    cpu[steps++] = seconds(CLOCK_PROCESS_CPUTIME_ID) - cpu_at;
  }
  qsort(wall, (size_t)steps, sizeof *wall, ascending);
  qsort(cpu, (size_t)steps, sizeof *cpu, ascending);
  printf("  \"%s\": {\"wall_s\": %.9f, \"cpu_s\": %.9f, \"steps\": %d, \"value\": %g, ", part->name,
         wall[steps / 2], cpu[steps / 2], steps, value);
  print_work(part);
  printf("}");
}

/* Read the first line of the output of a command. Omit characters that JSON would have to escape. */
static int first_line(const char *command, char *line, int size) {
  FILE *pipe = popen(command, "r");
  if (!pipe) return 0;
  char *got = fgets(line, size, pipe);
  pclose(pipe);
  int length = 0;
  for (char *c = line; got && *c; c++)
    if (*c >= ' ' && *c != '"' && *c != '\\') line[length++] = *c;
  line[length] = 0;
  return length > 0;
}

static void print_facts(int threads) {
  struct utsname host;
  char name[128] = "";
  uname(&host);
  if (!first_line("cat /proc/device-tree/model 2>/dev/null", name, sizeof name) &&
      !first_line("getprop ro.product.model 2>/dev/null", name, sizeof name))
    snprintf(name, sizeof name, "%.100s", host.machine);
  printf("{\"kit\": 1, \"runtime\": \"c\", \"device\": \"%s\", \"cores\": %ld, \"threads\": %d,\n", name,
         sysconf(_SC_NPROCESSORS_ONLN), threads);
  printf(" \"host\": {\"machine\": \"%s\", \"system\": \"%s %s\", \"compiler\": \"" __VERSION__ "\"},\n",
         host.machine, host.sysname, host.release);
}

int main(int count, char **arguments) {
  const int quick = count == 2 && !strcmp(arguments[1], "--quick");
  if (count > 1 && !quick) return fprintf(stderr, "usage: %s [--quick]\n", arguments[0]), 2;
  float **arrays[] = {&in, &weight, &out, &scratch};
  for (int i = 0; i < 4; i++)
    if (!(*arrays[i] = malloc(sizeof(float) * FLOATS))) return fprintf(stderr, "no memory\n"), 1;
  int threads = 1;
#ifdef _OPENMP
  threads = omp_get_max_threads();
#endif
  print_facts(threads);
  printf(" \"parts\": {\n");
  const int parts = sizeof PARTS / sizeof *PARTS;
  for (int i = 0; i < parts; i++) {
    measure(&PARTS[i], quick ? 1 : 5, quick ? 0.05 : 1.5);
    printf(i + 1 < parts ? ",\n" : "\n");
    fflush(stdout);
  }
  printf(" }}\n");
  return 0;
}
