/* The network between the store and the client: latency, rates, slow and dead requests.
 *
 * Which request is slow or dead is a function of the seed and the request's number only, so two
 * runs with the same number of requests meet the same faults.
 */
#ifndef PACE_H
#define PACE_H

struct pace_options {
    double latency_s;       /* before the first byte of a reply */
    double connection_rate; /* bytes/s of each reply; 0: no limit */
    double link_rate;       /* bytes/s of all replies together; 0: no limit */
    double slow_share, slow_factor; /* these have that many times the latency, and so much less
                                       of their connection's rate and of the link */
    double stall_share;     /* these never end: half bring no body, half a part of it */
    unsigned long seed;
};
extern struct pace_options pace;

struct fate {
    int slow;
    double latency_s, rate;
    double stall_at; /* share of the body after which nothing comes; 2: it ends */
    double weight;   /* its share of the link is link_rate * weight / weights that send now */
    double due_s;    /* when a slow one may go on */
};

struct fate pace_fate(unsigned long request);
double pace_now_s(void);
void pace_sleep_until(double instant_s);
/* Around a body: the connection sends, and counts where the link is shared. */
void pace_begin(struct fate *fate);
void pace_end(const struct fate *fate);
/* Waits for this many bytes' turn on the link; connections take turns. */
void pace_link(struct fate *fate, long bytes);
#endif
