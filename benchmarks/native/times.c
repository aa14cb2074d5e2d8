#include "times.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

enum { KEPT = 1 << 16 }; /* of each kind; a longer run is judged by its first ones */
static double times_s[2 * KEPT], s_per_mib[2][KEPT];
static int counts[2], count;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

void times_add(int slow, double time_s, long bytes) {
    pthread_mutex_lock(&lock);
    if (counts[slow] < KEPT) {
        s_per_mib[slow][counts[slow]++] = time_s / bytes * (1 << 20);
        times_s[count++] = time_s;
    }
    pthread_mutex_unlock(&lock);
}

static int compare(const void *left, const void *right) {
    double difference = *(const double *)left - *(const double *)right;
    return (difference > 0) - (difference < 0);
}

/* Sorts; the nearest rank. */
static void print_quantile(const char *name, double *values, int size, double share) {
    qsort(values, size, sizeof *values, compare);
    if (size) printf("\"%s\": %.6f, ", name, values[(int)(share * size)]);
    else printf("\"%s\": null, ", name);
}

void times_print(void) {
    pthread_mutex_lock(&lock);
    print_quantile("request_p50_s", times_s, count, 0.50);
    print_quantile("request_p95_s", times_s, count, 0.95);
    print_quantile("other_s_per_mib", s_per_mib[0], counts[0], 0.50);
    print_quantile("slow_s_per_mib", s_per_mib[1], counts[1], 0.50);
    counts[0] = counts[1] = count = 0;
    pthread_mutex_unlock(&lock);
}
