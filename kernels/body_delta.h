/* The part of the CPU kernels that computes an update and its checksum in one pass over memory. */

/* Interleave the four quarters of the vectors, each with its own running sums, so that enough loads are in flight. */
EF_TARGET static void EF(delta)(ef_loose_float *__restrict out, const ef_loose_float *trained,
                                const ef_loose_float *base, int64_t n, int around, uint64_t s[2])
{
    enum { STREAMS = 4, AHEAD = 8 * 64 / 4 };
    const int64_t quarter = n / STREAMS / EF_W * EF_W;
    EF(W) w[STREAMS] = {{{0}, {0}, {0}, {0}}};
    for (int64_t i = 0; i < quarter; i += EF_W) {
        for (int k = 0; k < STREAMS; k++) {
            const int64_t at = k * quarter + i;
            __builtin_prefetch(trained + at + AHEAD);
            __builtin_prefetch(base + at + AHEAD);
            const EF(V) v = EF(vsub)(EF(vload)(trained + at), EF(vload)(base + at));
            if (around)
                EF(vstream)((float *)(out + at), v);
            else
                EF(vstore)((float *)(out + at), v);
            for (size_t part = 0; part < sizeof v; part += sizeof(EF(U))) EF(wadd)(&w[k], (const char *)&v + part);
        }
    }
    const uint64_t rounds = (uint64_t)(quarter / EF(WORDS));
    for (int k = 0; k < STREAMS; k++) EF(wfold)(&w[k], rounds, (uint64_t)(k * quarter), s);
    for (int64_t i = STREAMS * quarter; i < n; i++) {
        uint32_t word;
        out[i] = trained[i] - base[i];
        memcpy(&word, out + i, 4);
        s[0] += word;
        s[1] += (uint64_t)(i + 1) * word;
    }
}
