/* The floor: the least that a client in C needs to receive objects by ranges over HTTP/1.1.
 *
 *     range_client PORT CHUNK_BYTES CONNECTIONS AUTHORITY NAME:BYTES...
 *
 * AUTHORITY is a PEM file for TLS, or "-" for plain HTTP. One thread, connection and buffer for
 * each connection; all chunks of all objects in order. `recv` with MSG_WAITALL, or SSL_read with
 * read-ahead, straight into the buffer. Connections are open and buffers touched before the
 * measurement. Checks the first and last word of every chunk (see content.h).
 * Prints one line of JSON: {"cpu_s": ..., "wall_s": ..., "bytes": ...}.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>
#ifdef WITH_TLS
#include <openssl/ssl.h>
static SSL_CTX *context;
#endif

#include "content.h"

enum { HEAD_LIMIT = 4096, WARM_ROUNDS = 2, FIRST_OBJECT = 5 };
struct chunk {
    const char *name;
    long start, size;
};
static struct chunk *chunks;
static long port, chunk_bytes, connections, chunk_count, total_bytes, next_chunk;
static pthread_barrier_t barrier;

static void die(const char *what) {
    perror(what);
    exit(1);
}

static struct wire open_connection(void) {
    int fd = socket(AF_INET, SOCK_STREAM, 0), one = 1;
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(port)};
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (connect(fd, (struct sockaddr *)&address, sizeof address)) die("connect");
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    struct wire wire = {.fd = fd};
#ifdef WITH_TLS
    if (context) {
        SSL *tls = SSL_new(context);
        SSL_set_fd(tls, fd);
        SSL_set_tlsext_host_name(tls, "localhost");
        SSL_set1_host(tls, "localhost");
        if (SSL_connect(tls) != 1) die("TLS");
        wire.tls = tls;
    }
#endif
    return wire;
}

static void use_authority(const char *file) {
    if (!strcmp(file, "-")) return;
#ifdef WITH_TLS
    context = SSL_CTX_new(TLS_client_method());
    if (SSL_CTX_load_verify_locations(context, file, NULL) != 1) die(file);
    SSL_CTX_set_verify(context, SSL_VERIFY_PEER, NULL);
    SSL_CTX_set_read_ahead(context, 1);
#else
    fprintf(stderr, "built without TLS\n");
    exit(1);
#endif
}

static ssize_t receive(struct wire *wire, char *buffer, long size, int flags) {
#ifdef WITH_TLS
    if (wire->tls) return SSL_read(wire->tls, buffer, size);
#endif
    return recv(wire->fd, buffer, size, flags);
}

static void transmit(struct wire *wire, const char *data, int size) {
#ifdef WITH_TLS
    if (wire->tls) {
        if (SSL_write(wire->tls, data, size) != size) die("send");
        return;
    }
#endif
    if (send(wire->fd, data, size, MSG_NOSIGNAL) != size) die("send");
}

static int is_right(const char *data, long offset) {
    uint64_t word;
    memcpy(&word, data, 8);
    return offset < HEADER_BYTES ||
           word == (uint64_t)(offset % PERIOD_BYTES / 8) * 0x9E3779B97F4A7C15u;
}

static void get(struct wire *wire, char *buffer, const struct chunk *chunk) {
    char head[HEAD_LIMIT];
    int length = snprintf(head, sizeof head,
                          "GET /bucket/%s HTTP/1.1\r\nHost: 127.0.0.1:%ld\r\n"
                          "Range: bytes=%ld-%ld\r\n\r\n",
                          chunk->name, port, chunk->start, chunk->start + chunk->size - 1);
    transmit(wire, head, length);
    long have = 0;
    char *end = NULL;
    while (!end) {
        ssize_t got = receive(wire, head + have, sizeof head - have, 0);
        if (got <= 0) die("receive");
        have += got;
        end = memmem(head, have, "\r\n\r\n", 4);
    }
    if (memcmp(head + 9, "206", 3)) die("status");
    long body = have - (end + 4 - head);
    memcpy(buffer, end + 4, body);
    while (body < chunk->size) {
        ssize_t got = receive(wire, buffer + body, chunk->size - body, MSG_WAITALL);
        if (got <= 0) die("receive");
        body += got;
    }
    if (!is_right(buffer, chunk->start) ||
        !is_right(buffer + body - 8, chunk->start + chunk->size - 8)) {
        fprintf(stderr, "wrong bytes at %ld\n", chunk->start);
        exit(1);
    }
}

static void *work(void *unused) {
    char *buffer = mmap(NULL, chunk_bytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    if (buffer == MAP_FAILED) die("mmap");
    struct wire wire = open_connection();
    for (int i = 0; i < WARM_ROUNDS; i++) get(&wire, buffer, chunks);
    pthread_barrier_wait(&barrier);
    pthread_barrier_wait(&barrier);
    for (;;) {
        long chunk = __sync_fetch_and_add(&next_chunk, 1);
        if (chunk >= chunk_count) break;
        get(&wire, buffer, chunks + chunk);
    }
    pthread_barrier_wait(&barrier);
    return unused;
}

static void plan(int count, char **specifications) {
    for (int i = 0; i < count; i++) {
        char *colon = strrchr(specifications[i], ':');
        if (!colon) die(specifications[i]);
        *colon = 0;
        long object_bytes = atol(colon + 1);
        total_bytes += object_bytes;
        for (long start = 0; start < object_bytes; start += chunk_bytes) {
            long left = object_bytes - start;
            chunks = realloc(chunks, (chunk_count + 1) * sizeof *chunks);
            chunks[chunk_count++] = (struct chunk){specifications[i], start,
                                                   left < chunk_bytes ? left : chunk_bytes};
        }
    }
}

static double cpu_s(void) {
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    return usage.ru_utime.tv_sec + usage.ru_stime.tv_sec +
           (usage.ru_utime.tv_usec + usage.ru_stime.tv_usec) / 1e6;
}

static double wall_s(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec + now.tv_nsec / 1e9;
}

int main(int count, char **arguments) {
    if (count <= FIRST_OBJECT) {
        fprintf(stderr, "usage: range_client PORT CHUNK CONNECTIONS AUTHORITY NAME:BYTES...\n");
        return 2;
    }
    port = atol(arguments[1]);
    chunk_bytes = atol(arguments[2]);
    connections = atol(arguments[3]);
    use_authority(arguments[4]);
    plan(count - FIRST_OBJECT, arguments + FIRST_OBJECT);
    pthread_barrier_init(&barrier, NULL, connections + 1);
    for (long i = 0; i < connections; i++) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, work, NULL)) die("thread");
        pthread_detach(thread);
    }
    pthread_barrier_wait(&barrier);
    double cpu = cpu_s(), wall = wall_s();
    pthread_barrier_wait(&barrier);
    pthread_barrier_wait(&barrier);
    printf("{\"cpu_s\": %.6f, \"wall_s\": %.6f, \"bytes\": %ld}\n", cpu_s() - cpu,
           wall_s() - wall, total_bytes);
    fflush(stdout);
    // Not by exit: it takes OpenSSL down while the threads are still ending.
    _exit(0);
}
