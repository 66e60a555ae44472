/* Files over HTTP by ranges, as far away as asked: enough of S3 for s3fs and for signed URLs to read keys.
 *
 *     far_object FILE DELAY_MS        prints its port; ends when its standard input does
 *     far_object FOLDER DELAY_MS      /BUCKET/a/b is FOLDER/a/b, whatever the bucket
 *
 * The first byte of an answer leaves DELAY_MS after the last byte of its request came. A thread for each connection, and
 * sendfile: some 20 us of a core for a request of 16 KiB, where a store that checks signatures needs 500. Any path is
 * the file, if it is one; HEAD and GET are all there is, no signature is looked at. In C because asyncio's timers round up to whole
 * milliseconds, which 1 ms would not survive. Source: us.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { HEAD_BYTES = 16384, STACK_BYTES = 128 << 10 };

static int root, is_folder;
static int64_t delay_ns;

/* The file that a request is for, open; -1 if there is none. */
static int open_asked(const char *request) {
    char path[1024];
    if (!is_folder) return dup(root);
    if (sscanf(request, "%*s /%*[^/]/%1023[^ ?]", path) != 1 || strstr(path, "..")) return -1;
    return openat(root, path, O_RDONLY);
}

static void wait_from(struct timespec came) {
    int64_t nanoseconds = came.tv_nsec + delay_ns;
    came.tv_sec += nanoseconds / 1000000000;
    came.tv_nsec = nanoseconds % 1000000000;
    clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &came, NULL);
}

/* Where a request's head ends in the first `have` bytes, reading on until it does; -1 when the client is gone. */
static int64_t read_head(int client, char *head, size_t *have) {
    for (;;) {
        head[*have] = 0;
        char *end = strstr(head, "\r\n\r\n");
        if (end) return end + 4 - head;
        ssize_t more = *have < HEAD_BYTES - 1 ? recv(client, head + *have, HEAD_BYTES - 1 - *have, 0) : -1;
        if (more <= 0) return -1;
        *have += (size_t)more;
    }
}

/* Bytes [first, last] of the file that the head asks for; 1 if it names a range. */
static int asked_range(const char *head, int64_t size, int64_t *first, int64_t *last) {
    const char *range = strcasestr(head, "\r\nrange: bytes=");
    *first = 0, *last = size - 1;
    if (!range) return 0;
    range += strlen("\r\nrange: bytes=");
    if (*range == '-') {
        *first = size - strtoll(range + 1, NULL, 10);
        if (*first < 0) *first = 0;
        return 1;
    }
    char *rest;
    *first = strtoll(range, &rest, 10);
    if (rest[1] >= '0' && rest[1] <= '9') *last = strtoll(rest + 1, NULL, 10);
    if (*last >= size) *last = size - 1;
    return 1;
}

static int refuse(int client) {
    static const char none[] = "HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n";
    return send(client, none, sizeof none - 1, MSG_NOSIGNAL) < 0 ? -1 : 0;
}

/* 0 once the answer is sent, -1 when the client is gone. */
static int answer(int client, const char *request, int file) {
    struct stat found;
    if (fstat(file, &found) || !S_ISREG(found.st_mode)) return refuse(client);
    int64_t first, last, size = found.st_size;
    int partial = asked_range(request, size, &first, &last), bodiless = !strncmp(request, "HEAD ", 5);
    if (first > last) return -1;
    char head[512];
    int length = snprintf(head, sizeof head,
                          "HTTP/1.1 %s\r\nContent-Length: %lld\r\nContent-Range: bytes %lld-%lld/%lld\r\nETag: \"%llx\"\r\n"
                          "Last-Modified: Fri, 20 Nov 2026 00:00:00 GMT\r\nAccept-Ranges: bytes\r\n"
                          "Content-Type: application/octet-stream\r\n\r\n",
                          partial ? "206 Partial Content" : "200 OK", (long long)(last - first + 1), (long long)first,
                          (long long)last, (long long)size,
                          (unsigned long long)(found.st_mtim.tv_sec * 1000000000LL + found.st_mtim.tv_nsec));
    if (send(client, head, (size_t)length, MSG_NOSIGNAL | (bodiless ? 0 : MSG_MORE)) != length) return -1;
    off_t at = first;
    while (!bodiless && at <= last)
        if (sendfile(client, file, &at, (size_t)(last + 1 - at)) <= 0) return -1;
    return 0;
}

static void *serve(void *argument) {
    int client = (int)(intptr_t)argument, yes = 1;
    char head[HEAD_BYTES];
    size_t have = 0;
    int64_t used;
    setsockopt(client, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
    while ((used = read_head(client, head, &have)) > 0) {
        struct timespec came;
        clock_gettime(CLOCK_MONOTONIC, &came);
        wait_from(came);
        int file = open_asked(head), gone = answer(client, head, file);
        if (file >= 0) close(file);
        if (gone) break;
        have -= (size_t)used;
        memmove(head, head + used, have);
    }
    close(client);
    return NULL;
}

static void *leave_with_input(void *unused) {
    char byte;
    while (read(0, &byte, 1) > 0) continue;
    _exit(0);
    return unused;
}

int main(int count, char **arguments) {
    struct stat found;
    struct sockaddr_in address = {.sin_family = AF_INET};
    socklen_t length = sizeof address;
    if (count != 3 || (root = open(arguments[1], O_RDONLY)) < 0 || fstat(root, &found)) return perror("far_object"), 2;
    is_folder = S_ISDIR(found.st_mode);
    delay_ns = (int64_t)(atof(arguments[2]) * 1e6);
    signal(SIGPIPE, SIG_IGN);
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    int server = socket(AF_INET, SOCK_STREAM, 0);
    if (bind(server, (void *)&address, length) || listen(server, 1024)) return perror("far_object"), 1;
    getsockname(server, (void *)&address, &length);
    printf("%d\n", ntohs(address.sin_port));
    fflush(stdout);
    pthread_attr_t small;
    pthread_attr_init(&small);
    pthread_attr_setstacksize(&small, STACK_BYTES);
    pthread_attr_setdetachstate(&small, PTHREAD_CREATE_DETACHED);
    pthread_t thread;
    pthread_create(&thread, &small, leave_with_input, NULL);
    for (;;) {
        int client = accept(server, NULL, NULL);
        if (client >= 0) pthread_create(&thread, &small, serve, (void *)(intptr_t)client);
    }
}
