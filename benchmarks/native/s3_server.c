/* A loopback object store for benchmarks: deterministic objects over HTTP/1.1 or TLS.
 *
 *     s3_server [OPTION VALUE]... NAME:BYTES...
 *
 *     --cert FILE --key FILE        TLS
 *     --latency-ms MS               before the first byte of each reply
 *     --connection-rate BYTES_PER_S of one reply
 *     --link-rate BYTES_PER_S       of all replies together, connections taking turns
 *     --slow-share P --slow-factor X   a share of the GETs takes X times as long, also where the
 *                                   link is full
 *     --stall-share P               a share of the GETs never ends
 *     --seed N                      chooses which
 *
 * Listens on a free port of 127.0.0.1 and prints the port. Each line on standard input is
 * answered with one line of JSON, the counters since the last one, which then start again at
 * zero; it ends when standard input closes, with a last such line. The times in it are those of
 * GETs, from the request to the reply's last byte, stalled ones left out; of one whose connection
 * the client closed, what the whole would have taken at that pace.
 *
 * Path style, any bucket: GET and HEAD with Range and If-Match, ListObjectsV2 (one page), HEAD of
 * the bucket. Keep-alive. No authentication: what is measured is the client. What objects hold is
 * in content.h. Without limits, bodies leave by sendfile: the server takes little CPU.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include "content.h"
#include "pace.h"
#include "times.h"

enum { REQUEST_LIMIT = 16384, REPLY_LIMIT = 1024, PACED_BYTES = 256 << 10, FREE_BYTES = 1 << 20 };
static struct object *objects;
static int object_count;
static struct {
    unsigned long requests, bytes, connections, slow, stalled, small;
} counters;
static double first_request_s; /* since the counters started; the monotonic clock */
#define COUNT(name, by) __atomic_add_fetch(&counters.name, (by), __ATOMIC_RELAXED)

static void die(const char *what) {
    perror(what);
    exit(1);
}

static const struct object *find_object(const char *name) {
    for (int i = 0; i < object_count; i++)
        if (!strcmp(objects[i].name, name)) return &objects[i];
    return NULL;
}

/* The value of a header, on the stack of the caller; NULL if there is none. */
static const char *header_value(const char *head, const char *name, char value[static 256]) {
    const char *found = strcasestr(head, name);
    if (!found || sscanf(found + strlen(name), " %255[^\r\n]", value) != 1) return NULL;
    return value;
}

static int send_small(struct wire *wire, const char *status, const char *body, int with_body) {
    char head[REPLY_LIMIT];
    COUNT(small, 1);
    int size = snprintf(head, sizeof head,
                        "HTTP/1.1 %s\r\nx-amz-request-id: 0123456789ABCDEF\r\n"
                        "x-amz-bucket-region: us-east-1\r\nContent-Type: application/xml\r\n"
                        "Content-Length: %zu\r\n\r\n",
                        status, strlen(body));
    int failed = wire_send(wire, head, size, with_body && *body);
    if (!failed && with_body && *body) failed = wire_send(wire, body, strlen(body), 0);
    return failed;
}

static int send_listing(struct wire *wire, const char *bucket, const char *query) {
    char prefix[256] = "", *text;
    size_t size;
    const char *found = strstr(query, "prefix=");
    if (found) sscanf(found + strlen("prefix="), "%255[^& ]", prefix);
    FILE *xml = open_memstream(&text, &size);
    fprintf(xml,
            "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n"
            "<ListBucketResult xmlns=\"http://s3.amazonaws.com/doc/2006-03-01/\">"
            "<Name>%s</Name><Prefix>%s</Prefix><MaxKeys>1000</MaxKeys>"
            "<IsTruncated>false</IsTruncated>",
            bucket, prefix);
    int count = 0;
    for (int i = 0; i < object_count; i++) {
        if (strncmp(objects[i].name, prefix, strlen(prefix))) continue;
        count++;
        fprintf(xml,
                "<Contents><Key>%s</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
                "<ETag>&quot;%ld&quot;</ETag><Size>%ld</Size>"
                "<StorageClass>STANDARD</StorageClass></Contents>",
                objects[i].name, objects[i].size, objects[i].size);
    }
    fprintf(xml, "<KeyCount>%d</KeyCount></ListBucketResult>", count);
    fclose(xml);
    int failed = send_small(wire, "200 OK", text, 1);
    free(text);
    return failed;
}

/* The body, as the request's fate allows: 0, or -1 if this connection is over. */
static int send_body(struct wire *wire, const struct object *object, long start, long size,
                     struct fate *fate, double began_s) {
    long end = fate->stall_at < 1 ? (long)(size * fate->stall_at) : size, done = 0;
    int failed = 0;
    long quantum = fate->rate > 0 || pace.link_rate > 0 ? PACED_BYTES : FREE_BYTES;
    pace_begin(fate);
    while (done < end) {
        long part = end - done < quantum ? end - done : quantum;
        if (fate->rate > 0) pace_sleep_until(began_s + (done + part) / fate->rate);
        pace_link(fate, part);
        failed = content_send(wire, object, start + done, part);
        if (failed) break;
        done += part;
        COUNT(bytes, part);
    }
    pace_end(fate);
    if (end == size && done)
        times_add(fate->slow, fate->latency_s + (pace_now_s() - began_s) * size / done, size);
    if (failed || end == size) return failed ? -1 : 0;
    wire_wait_for_close(wire);
    return -1;
}

static int send_object(struct wire *wire, const struct object *object, const char *head,
                       int is_get) {
    char value[256], etag[32], reply[REPLY_LIMIT];
    long first = 0, last = object->size - 1;
    const char *range = header_value(head, "\nrange:", value);
    int partial = range && sscanf(range, "bytes=%ld-%ld", &first, &last) >= 1;
    if (partial && first < 0) first += object->size, last = object->size - 1;
    if (last >= object->size) last = object->size - 1;
    if (first > last || first < 0)
        return send_small(wire, "416 Range Not Satisfiable",
                          "<Error><Code>InvalidRange</Code></Error>", is_get);
    snprintf(etag, sizeof etag, "\"%ld\"", object->size);
    const char *expected = header_value(head, "\nif-match:", value);
    if (expected && strcmp(expected, etag))
        return send_small(wire, "412 Precondition Failed",
                          "<Error><Code>PreconditionFailed</Code></Error>", is_get);
    int size = snprintf(reply, sizeof reply,
                        "HTTP/1.1 %s\r\nx-amz-request-id: 0123456789ABCDEF\r\n"
                        "Last-Modified: Thu, 01 Jan 2026 00:00:00 GMT\r\nETag: %s\r\n"
                        "Accept-Ranges: bytes\r\nContent-Type: binary/octet-stream\r\n"
                        "Server: AmazonS3\r\nContent-Length: %ld\r\n",
                        partial ? "206 Partial Content" : "200 OK", etag, last - first + 1);
    if (partial)
        size += snprintf(reply + size, sizeof reply - size, "Content-Range: bytes %ld-%ld/%ld\r\n",
                         first, last, object->size);
    size += snprintf(reply + size, sizeof reply - size, "\r\n");
    double began_s = pace_now_s();
    struct fate fate = {.latency_s = pace.latency_s, .stall_at = 2, .weight = 1};
    if (is_get) {
        unsigned long number = COUNT(requests, 1);
        fate = pace_fate(number);
        if (number == 1) first_request_s = began_s;
        if (fate.slow) COUNT(slow, 1);
        if (fate.stall_at < 1) COUNT(stalled, 1);
    }
    if (fate.latency_s > 0) pace_sleep_until(began_s += fate.latency_s);
    if (!is_get) COUNT(small, 1);
    if (wire_send(wire, reply, size, is_get && fate.stall_at > 0)) return -1;
    return is_get ? send_body(wire, object, first, last - first + 1, &fate, began_s) : 0;
}

static int answer(struct wire *wire, const char *head) {
    char method[8], target[2048];
    if (sscanf(head, "%7s %2047s", method, target) != 2) return -1;
    /* The absolute form, as for a proxy, is what Run:ai's SDK sends. */
    const char *scheme = strstr(target, "://");
    char *path = scheme ? strchr(scheme + 3, '/') : target;
    if (!path || *path++ != '/') return -1;
    int is_get = !strcmp(method, "GET");
    if (!is_get && strcmp(method, "HEAD")) {
        send_small(wire, "405 Method Not Allowed", "", 1);
        return -1;
    }
    char *query = strchr(path, '?');
    if (query) *query++ = 0;
    char *name = strchr(path, '/');
    if (name) *name++ = 0;
    if (!name || !*name) {
        if (pace.latency_s > 0) pace_sleep_until(pace_now_s() + pace.latency_s);
        return is_get ? send_listing(wire, path, query ? query : "")
                      : send_small(wire, "200 OK", "", 0);
    }
    const struct object *object = find_object(name);
    if (!object)
        return send_small(wire, "404 Not Found", "<Error><Code>NoSuchKey</Code></Error>", is_get);
    return send_object(wire, object, head, is_get);
}

static void *serve(void *argument) {
    struct wire wire;
    char buffer[REQUEST_LIMIT + 1];
    size_t have = 0;
    COUNT(connections, 1);
    int open = !wire_open(&wire, (int)(intptr_t)argument);
    while (open) {
        buffer[have] = 0;
        char *end = strstr(buffer, "\r\n\r\n");
        if (end) {
            *end = 0;
            open = !answer(&wire, buffer) && !strcasestr(buffer, "\nconnection: close");
            have -= end + 4 - buffer;
            memmove(buffer, end + 4, have);
            continue;
        }
        ssize_t got =
            have < REQUEST_LIMIT ? wire_receive(&wire, buffer + have, REQUEST_LIMIT - have) : 0;
        if (got <= 0) break;
        have += got;
    }
    wire_close(&wire);
    return NULL;
}

static void print_counters(void) {
    static double cpu_before_s;
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    double cpu_s = usage.ru_utime.tv_sec + usage.ru_stime.tv_sec +
                   (usage.ru_utime.tv_usec + usage.ru_stime.tv_usec) / 1e6;
#define TAKE(name) __atomic_exchange_n(&counters.name, 0, __ATOMIC_RELAXED)
    printf("{");
    times_print();
    printf("\"requests\": %lu, \"bytes\": %lu, \"connections\": %lu, \"slow\": %lu, "
           "\"stalled\": %lu, \"small_requests\": %lu, \"server_cpu_s\": %.3f, "
           "\"first_request_s\": %.6f}\n",
           TAKE(requests), TAKE(bytes), TAKE(connections), TAKE(slow), TAKE(stalled), TAKE(small),
           cpu_s - cpu_before_s, first_request_s);
    fflush(stdout);
    cpu_before_s = cpu_s;
}

static void *answer_owner(void *unused) {
    char line[64];
    while (fgets(line, sizeof line, stdin)) print_counters();
    print_counters();
    fflush(stdout);
    _exit(0);  // connections still have threads, and exit would take OpenSSL from them
    return unused;
}

static double *number_option(const char *name) {
    struct {
        const char *name;
        double *value;
    } known[] = {{"--connection-rate", &pace.connection_rate}, {"--link-rate", &pace.link_rate},
                 {"--slow-share", &pace.slow_share},           {"--slow-factor", &pace.slow_factor},
                 {"--stall-share", &pace.stall_share},         {"--latency-ms", &pace.latency_s}};
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (!strcmp(name, known[i].name)) return known[i].value;
    fprintf(stderr, "unknown option %s\n", name);
    exit(2);
}

static void read_arguments(int count, char **arguments) {
    const char *certificate = NULL, *key = NULL;
    objects = calloc(count, sizeof *objects);
    for (int i = 1; i < count; i++) {
        const char *name = arguments[i], *value = i + 1 < count ? arguments[i + 1] : "";
        if (strncmp(name, "--", 2)) {
            objects[object_count++] = content_object(name);
            continue;
        }
        i++;
        if (!strcmp(name, "--cert")) certificate = value;
        else if (!strcmp(name, "--key")) key = value;
        else if (!strcmp(name, "--seed")) pace.seed = strtoul(value, NULL, 10);
        else *number_option(name) = atof(value);
    }
    pace.latency_s /= 1000;
    if (certificate) wire_use_tls(certificate, key ? key : certificate);
}

int main(int count, char **arguments) {
    signal(SIGPIPE, SIG_IGN);
    prctl(PR_SET_TIMERSLACK, 1000UL); /* inherited by every thread */
    read_arguments(count, arguments);
    content_make();
    int listener = socket(AF_INET, SOCK_STREAM, 0), one = 1, buffer_bytes = 256 << 10;
    /* What waits in a large buffer would be counted as sent while the client has not seen it. */
    if (pace.connection_rate > 0 || pace.link_rate > 0)
        setsockopt(listener, SOL_SOCKET, SO_SNDBUF, &buffer_bytes, sizeof buffer_bytes);
    struct sockaddr_in address = {.sin_family = AF_INET};
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof address;
    if (bind(listener, (struct sockaddr *)&address, size) || listen(listener, 4096) ||
        getsockname(listener, (struct sockaddr *)&address, &size))
        die("listen");
    printf("%d\n", ntohs(address.sin_port));
    fflush(stdout);
    pthread_t thread;
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, 256 << 10);
    if (pthread_create(&thread, NULL, answer_owner, NULL)) die("thread");
    for (;;) {
        int fd = accept(listener, NULL, NULL);
        if (fd < 0) continue;
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
        if (pthread_create(&thread, &attributes, serve, (void *)(intptr_t)fd)) close(fd);
        else pthread_detach(thread);
    }
}
