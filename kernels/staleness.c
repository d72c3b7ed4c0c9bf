/* Moving averages of the staleness of each client, stored in flat arrays that are indexed by client. `count` is the
 * total number of observations of a client. */
#include "edgefl_kernels.h"

static double ef_mean(const ef_means *m, int64_t client)
{
    const int64_t count = m->count[client];
    const double *state = m->state + client * m->width;
    if (!count) return 0.0;
    if (m->mode == EF_EXPONENTIAL) return state[0];
    if (m->mode == EF_CUMULATIVE) return state[0] / (double)count;
    const int64_t kept = count < m->width ? count : m->width;
    double sum = 0.0;
    for (int64_t i = 0; i < kept; i++) sum += state[i];
    return sum / (double)kept;
}

double ef_observe(const ef_means *m, int64_t client, double value)
{
    double *state = m->state + client * m->width;
    int64_t *count = m->count + client;
    if (m->mode == EF_WINDOW) state[*count % m->width] = value;
    else if (m->mode == EF_CUMULATIVE) state[0] += value;
    else state[0] = *count ? m->decay * state[0] + (1.0 - m->decay) * value : value;
    ++*count;
    return ef_mean(m, client);
}
