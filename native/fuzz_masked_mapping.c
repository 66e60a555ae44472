/* fuzz_masked_mapping.c: samples and blocks of any documents, against their rule in its plainest form.
 *
 * Input: flags 1, sequence length 2, short ratio 1, least 1, epochs 1, samples 2, seed 4, documents 1, then a count of
 * sequences of 1 byte for each document and a length of 1 or 4 bytes for each sequence; missing bytes are 0.
 * Flags: 1 blocks, 2 lengths of 4 bytes, 4 bounds at fault, 8 lengths of about the longest that is usable.
 */
#include "fuzz.h"
#include "mt19937.h"
#include "mt19937_64.h"

enum { MOST_ROWS = 4096 };

static int64_t length_of(const binidx_masked *m, int64_t i) {
    int32_t length;
    memcpy(&length, (const char *)m->sequence_lengths + 4 * i, 4);
    return length;
}

static int64_t bound_of(const binidx_masked *m, int64_t d) {
    int64_t bound;
    memcpy(&bound, (const char *)m->documents + 8 * d, 8);
    return bound;
}

static int64_t plain_target(const binidx_masked *m, binidx_mt19937 *rng, int64_t d) {
    if (m->titles) return m->sequence_length - m->titles[d];
    if (!m->short_ratio) return m->sequence_length;
    int64_t word = next_word(rng);
    return word % m->short_ratio == 0 ? 2 + word % (m->sequence_length - 1) : m->sequence_length;
}

static int plain_usable(const binidx_masked *m, int64_t d) {
    int64_t first = bound_of(m, d), end = bound_of(m, d + 1), usable = end - first >= m->least;
    for (int64_t i = first; i < end; i++) usable &= length_of(m, i) <= 512 || (end - first == 1 && !m->titles);
    return (int)usable;
}

/* One epoch, sequence by sequence. */
static int64_t plain_epoch(const binidx_masked *m, binidx_mt19937 *rng, int64_t made, int64_t *rows) {
    int64_t block = 0;
    for (int64_t d = 0; d < m->num_documents; d++) {
        if (!plain_usable(m, d)) continue;
        int64_t start = bound_of(m, d), end = bound_of(m, d + 1), tokens = 0, target = plain_target(m, rng, d);
        for (int64_t i = start; i < end; i++) {
            int64_t left = end - i - 1, enough = m->titles ? left >= m->least : left > 1;
            tokens += length_of(m, i);
            if (!(tokens >= target && enough && i - start + 1 >= m->least) && left) continue;
            if (made < MOST_ROWS) memcpy(rows + 4 * made, (int64_t[]){start, i + 1, m->titles ? d : target, block}, 32);
            made++, block++, tokens = 0, start = i + 1, target = plain_target(m, rng, d);
        }
    }
    return made;
}

static void check_rows(const binidx_masked *m, const uint32_t *usable, binidx_mt19937 rng, int64_t epochs, int64_t made,
                       const int64_t *needed) {
    const int64_t columns = m->titles ? 4 : 3;
    uint32_t *narrow = bytes_of(4 * columns * made);
    uint64_t *wide = bytes_of(8 * columns * made);
    binidx_mt19937 again = rng, fewer = rng;
    same(binidx_masked_rows_4(m, usable, &rng, epochs, made, narrow) == made);
    same(binidx_masked_rows_8(m, usable, &again, epochs, made, wide) == made);
    for (int64_t i = 0; i < columns * made; i++) {
        int64_t value = needed[4 * (i / columns) + i % columns];
        same(narrow[i] == (uint32_t)value && wide[i] == (uint64_t)value);
    }
    if (made) same(binidx_masked_rows_4(m, usable, &fewer, epochs, made - 1, narrow) == BINIDX_BAD_TOKENS);
    binidx_mt19937_64 order, plain;
    binidx_mt19937_64_seed(&order, rng.key[0]), binidx_mt19937_64_seed(&plain, rng.key[0]);
    binidx_shuffle_rows(&order, wide, made, 8 * columns);
    int64_t *places = bytes_of(8 * made);
    for (int64_t i = 0; i < made; i++) places[i] = i;
    for (int64_t i = made - 1; i > 0; i--) {
        int64_t j = (int64_t)(next_wide_word(&plain) % (uint64_t)(i + 1)), held = places[i];
        places[i] = places[j], places[j] = held;
    }
    for (int64_t i = 0; i < columns * made; i++)
        same(wide[i] == (uint64_t)needed[4 * places[i / columns] + i % columns]);
    note(wide, 8 * columns * made);
    free(narrow), free(wide), free(places);
}

static void check_documents(const binidx_masked *m, uint32_t seed, int64_t most_epochs, int64_t num_samples) {
    uint32_t *usable = bytes_of(4 * m->num_documents);
    int64_t counts[3], epochs, num_usable = binidx_usable_documents(m, usable, counts), plain = 0, made = 0;
    if (num_usable == BINIDX_BAD_DOCUMENT) {
        free(usable);
        return;
    }
    for (int64_t d = 0; d < m->num_documents; d++) {
        same((usable[d] != 0) == plain_usable(m, d));
        plain += usable[d] != 0;
    }
    same(num_usable == plain);
    binidx_mt19937 rng, counting;
    binidx_mt19937_seed(&rng, seed, BINIDX_PORTABLE);
    counting = rng;
    int64_t found = binidx_count_masked(m, usable, &counting, most_epochs, num_samples, &epochs);
    int64_t *rows = bytes_of(32 * MOST_ROWS), done = 0;
    for (counting = rng; done < most_epochs && made < num_samples; done++) {
        int64_t before = made;
        made = plain_epoch(m, &counting, made, rows);
        if (made == before) break;
    }
    same(found == made && epochs == done);
    if (made <= MOST_ROWS) check_rows(m, usable, rng, epochs, made, rows);
    free(rows), free(usable);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    fuzz_input in = {data, size};
    int64_t flags = next(&in, 1), length = 2 + next(&in, 2) % 900, ratio = next(&in, 1) % 12, least = 1 + next(&in, 1) % 3;
    int64_t epochs = 1 + next(&in, 1) % 5, num_samples = next(&in, 2) % 1000, seed = next(&in, 4);
    int64_t num_documents = next(&in, 1) % 50, bounds[52], num_sequences = 0;
    for (int64_t d = 0; d <= num_documents; d++) {
        bounds[d] = num_sequences;
        num_sequences += next(&in, 1) % 40;
    }
    if (flags & 4) bounds[next(&in, 1) % (num_documents + 1)] = next(&in, 2) - 100;
    char *raw = bytes_of(8 * (num_documents + 1) + 2), *lengths = bytes_of(4 * num_sequences + 2);
    int32_t *titles = bytes_of(4 * num_documents);
    memcpy(raw + 2, bounds, 8 * (size_t)(num_documents + 1));
    for (int64_t i = 0; i < num_sequences; i++) {
        int32_t tokens = (int32_t)next(&in, flags & 2 ? 4 : 1);
        if (flags & 8) tokens = 509 + (tokens == 7 ? 4 : (tokens & 3));
        memcpy(lengths + 2 + 4 * i, &tokens, 4);
    }
    for (int64_t d = 0; d < num_documents; d++) titles[d] = (int32_t)(d * 7 % 40);
    binidx_masked m = {raw + 2, lengths + 2, flags & 1 ? titles : NULL, num_documents, num_sequences, length,
                       flags & 1 ? 0 : ratio, least};
    check_documents(&m, (uint32_t)seed, epochs, num_samples);
    free(raw), free(lengths), free(titles);
    return 0;
}
