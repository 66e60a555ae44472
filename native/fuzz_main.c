/* fuzz_main.c: what libFuzzer's main does, for compilers without it.
 *
 *     fuzz_x 5000          so many random inputs, always the same ones; prints a digest of all that came of them
 *     fuzz_x file ...      those that libFuzzer found
 *
 * With it: clang -std=c11 -g -O1 -ffp-contract=off -fsanitize=fuzzer,address,undefined native/fuzz_shuffle.c and the
 * files of the core, without test_*.c and this one.
 */
#include "fuzz.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum { LONGEST = 4096 };

/* xorshift64*: of Vigna 2014. */
static uint64_t draw(uint64_t *state) {
    *state ^= *state >> 12, *state ^= *state << 25, *state ^= *state >> 27;
    return *state * 0x2545f4914f6cdd1dull >> 16;
}

/* Half of them short; a third of the bytes 0 or 255, as sizes and edges are. */
static void random_inputs(long count) {
    uint64_t state = 1;
    for (long run = 0; run < count; run++) {
        size_t most = draw(&state) % 2 ? 64 : LONGEST, size = draw(&state) % most;
        uint8_t *data = malloc(size ? size : 1); /* so long that one byte too many is seen */
        if (!data) abort();
        for (size_t i = 0; i < size; i++) {
            uint64_t kind = draw(&state) % 6;
            data[i] = kind == 0 ? 0 : kind == 1 ? 255 : (uint8_t)draw(&state);
        }
        LLVMFuzzerTestOneInput(data, size);
        free(data);
    }
    printf("%016llx\n", (unsigned long long)fuzz_digest);
}

static int replay(const char *path) {
    static uint8_t data[1 << 20];
    FILE *file = fopen(path, "rb");
    if (!file) return perror(path), 2;
    size_t size = fread(data, 1, sizeof data, file);
    fclose(file);
    LLVMFuzzerTestOneInput(data, size);
    return 0;
}

int main(int argc, char **argv) {
    char *end = NULL;
    long count = argc == 2 ? strtol(argv[1], &end, 10) : 0;
    if (end && *end == '\0') return random_inputs(count), 0;
    for (int i = 1; i < argc; i++)
        if (replay(argv[i])) return 2;
    return 0;
}
