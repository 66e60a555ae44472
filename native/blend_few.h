/* blend_few.h: chunks of a blend of up to FEW datasets, their counts in registers; part of blend_lanes.h.
 *
 * Rows are kept ROWS at a time as they come, a vector across the chunks, and then turned into the runs of each chunk.
 * Cost: about one operation a dataset and sample; with 2 datasets half of it is the turning and the stores.
 */
enum { ROWS = 64 };

/* Some rows of W lanes, `stride` apart, into W runs of rows, `length` apart. */
TARGET BINIDX_BLEND_INLINE void write_turned(const double *picks, const double *numbers, int64_t stride, int64_t rows,
                                             int16_t *datasets, int64_t *samples, int64_t length) {
    if (rows == W && TURN(picks, numbers, stride, datasets, samples, length)) return;
    for (int64_t lane = 0; lane < W; lane++, datasets += length, samples += length) {
        for (int64_t row = 0; row < rows; row++) datasets[row] = (int16_t)picks[row * stride + lane];
        for (int64_t row = 0; row < rows; row++) samples[row] = (int64_t)numbers[row * stride + lane];
    }
}

/* One sample of W chunks. n and limited are constants where this is inlined. */
TARGET BINIDX_BLEND_INLINE void draw(const binidx_blend *blend, const int n, const int limited, V drawn, V *counts,
                                     double *pick, double *count) {
    V most = SPLAT(-INFINITY), at = SPLAT(0), left = SPLAT(-INFINITY), number = SPLAT(0);
    UNROLL
    for (int d = 0; d < n; d += 2) {
        V one = SUB(MUL(SPLAT(blend->weights[d]), drawn), counts[d]);
        V two = SUB(MUL(SPLAT(blend->weights[d + 1]), drawn), counts[d + 1]);
        V more = MAX(one, two);
        M behind = GT(more, most);
        at = PICK(behind, SPLAT(d), at);
        left = PICK(behind, one, left);
        most = MAX(more, most);
    }
    at = PICK(EQ(left, most), at, ADD(at, SPLAT(1)));
    UNROLL
    for (int d = 0; d < n; d++) {
        M drawn_from = EQ(at, SPLAT(d));
        number = PICK(drawn_from, counts[d], number);
        counts[d] = PICK(drawn_from, ADD(counts[d], SPLAT(1)), counts[d]);
        if (limited) counts[d] = PICK(GT(SPLAT(blend->limits[d]), counts[d]), counts[d], SPLAT(INFINITY));
    }
    if (limited) number = PICK(GT(SPLAT(INFINITY), number), number, SPLAT(0)); /* infinite only after a wrong guess */
    STORE(pick, at), STORE(count, number);
}

TARGET BINIDX_BLEND_INLINE void few_chunks(const binidx_blend *blend, int64_t first, int64_t length, double *counts,
                                             const int n, const int limited) {
    double picks[ROWS][GROUPS * W], numbers[ROWS][GROUPS * W], lanes[W];
    V held[GROUPS][FEW], drawn[GROUPS];
    for (int g = 0; g < GROUPS; g++) {
        for (int d = 0; d < n; d++) {
            for (int lane = 0; lane < W; lane++) lanes[lane] = counts[(g * W + lane) * blend->width + d];
            held[g][d] = LOAD(lanes);
        }
        for (int lane = 0; lane < W; lane++) lanes[lane] = (double)(first + (g * W + lane) * length);
        drawn[g] = LOAD(lanes);
    }
    for (int64_t done = 0; done < length; done += ROWS) {
        int64_t rows = length - done < ROWS ? length - done : ROWS;
        for (int64_t row = 0; row < rows; row++) {
            UNROLL
            for (int g = 0; g < GROUPS; g++) {
                draw(blend, n, limited, MAX(drawn[g], SPLAT(1)), held[g], picks[row] + g * W, numbers[row] + g * W);
                drawn[g] = ADD(drawn[g], SPLAT(1));
            }
        }
        for (int g = 0; g < GROUPS; g++)
            for (int64_t row = 0; row < rows; row += W) {
                int64_t at = first + g * W * length + done + row;
                write_turned(picks[row] + g * W, numbers[row] + g * W, GROUPS * W, rows - row < W ? rows - row : W,
                             blend->dataset_index + at, blend->dataset_sample_index + at, length);
            }
    }
    for (int g = 0; g < GROUPS; g++)
        for (int d = 0; d < n; d++) {
            STORE(lanes, held[g][d]);
            for (int lane = 0; lane < W; lane++) counts[(g * W + lane) * blend->width + d] = lanes[lane];
        }
}
