/* The NVML symbols that the node-reporter calls, for machines without a GPU: put first on the loader path.
 *
 * FAKE_NVML_HOLDERS   path of a file, read at each call: one line per process, the GPU, its pid and the MiB it holds
 * FAKE_NVML_GPUS      how many GPUs there are (default 2)
 * FAKE_NVML_CARDS     path of a file, read once: one line per GPU, its UUID, and "lost" behind it if it fell off the bus
 * FAKE_NVML_EVENTS    path of a FIFO; each line "GPU TYPE DATA" becomes one event of nvmlEventSetWait_v2;
 *                     with type 0 the GPU falls off the bus, and the wait fails as the real one does
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct { unsigned index; } device_t;
typedef struct { unsigned long long total, free, used; } memory_t;
typedef struct { unsigned gpu, memory; } utilisation_t;
typedef struct { device_t *device; unsigned long long type, data; unsigned gi, ci; } event_t;

typedef struct { unsigned pid; unsigned long long used; unsigned gi, ci; } process_t;

enum { SUCCESS = 0, INVALID_ARGUMENT = 2, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7, TIMEOUT = 10, GPU_IS_LOST = 15 };

static device_t devices[16];
static char uuids[16][80];
static int lost[16];

/* How many cards the file names; 0 without a file. */
static unsigned card_count(void) {
    static unsigned count;
    const char *path = getenv("FAKE_NVML_CARDS");
    char line[160], word[16];
    FILE *file = count || !path ? NULL : fopen(path, "r");
    if (!file) return count;
    while (count < 16 && fgets(line, sizeof line, file)) {
        int words = sscanf(line, "%79s %15s", uuids[count], word);
        lost[count] = words == 2 && strcmp(word, "lost") == 0;
        if (words >= 1) count++;
    }
    fclose(file);
    return count;
}

static unsigned gpu_count(void) {
    if (getenv("FAKE_NVML_CARDS")) return card_count();
    const char *text = getenv("FAKE_NVML_GPUS");
    return text ? (unsigned)atoi(text) : 2;
}

int nvmlInitWithFlags(unsigned flags) { (void)flags; return SUCCESS; }
int nvmlInit_v2(void) { return SUCCESS; }
int nvmlShutdown(void) { return SUCCESS; }

const char *nvmlErrorString(int code) {
    return code == SUCCESS ? "Success" : code == TIMEOUT ? "Timeout" : code == NOT_FOUND ? "Not Found"
        : code == GPU_IS_LOST ? "GPU is lost" : "Invalid Argument";
}

int nvmlDeviceGetCount_v2(unsigned *count) { *count = gpu_count(); return SUCCESS; }

int nvmlDeviceGetHandleByIndex_v2(unsigned index, device_t **device) {
    if (index >= gpu_count()) return INVALID_ARGUMENT;
    if (lost[index]) return GPU_IS_LOST;
    devices[index].index = index;
    *device = &devices[index];
    return SUCCESS;
}

int nvmlDeviceGetIndex(device_t *device, unsigned *index) { *index = device->index; return SUCCESS; }

int nvmlDeviceGetUUID(device_t *device, char *text, unsigned length) {
    if (card_count()) snprintf(text, length, "%s", uuids[device->index]);
    else snprintf(text, length, "GPU-00000000-0000-0000-0000-00000000000%x", device->index);
    return SUCCESS;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, device_t **device) {
    char own[96];
    for (unsigned index = 0; index < gpu_count(); index++) {
        device_t found = {index};
        nvmlDeviceGetUUID(&found, own, sizeof own);
        if (strcmp(own, uuid) == 0) return nvmlDeviceGetHandleByIndex_v2(index, device);
    }
    return NOT_FOUND;
}

int nvmlDeviceGetName(device_t *device, char *text, unsigned length) {
    (void)device;
    snprintf(text, length, "Tesla V100-SXM2 (fake)");
    return SUCCESS;
}

int nvmlDeviceGetMemoryInfo(device_t *device, memory_t *memory) {
    if (lost[device->index]) return GPU_IS_LOST;
    memory->total = 16384ULL << 20;
    memory->used = 1024ULL << 20;
    memory->free = memory->total - memory->used;
    return SUCCESS;
}

int nvmlDeviceGetUtilizationRates(device_t *device, utilisation_t *found) {
    (void)device;
    found->gpu = 73;
    found->memory = 21;
    return SUCCESS;
}

int nvmlDeviceGetComputeRunningProcesses_v3(device_t *device, unsigned *count, process_t *found) {
    const char *path = getenv("FAKE_NVML_HOLDERS");
    FILE *file = path ? fopen(path, "r") : NULL;
    unsigned gpu, pid, held = 0, room = *count;
    unsigned long long mib;
    while (file && fscanf(file, "%u %u %llu", &gpu, &pid, &mib) == 3) {
        if (gpu != device->index) continue;
        if (found && held < room) found[held] = (process_t){pid, mib << 20, 0, 0};
        held++;
    }
    if (file) fclose(file);
    *count = held;
    return held > room ? INSUFFICIENT_SIZE : SUCCESS;
}

int nvmlEventSetCreate(void **set) { *set = &devices; return SUCCESS; }
int nvmlEventSetFree(void *set) { (void)set; return SUCCESS; }

int nvmlDeviceGetSupportedEventTypes(device_t *device, unsigned long long *types) {
    (void)device;
    *types = 0x1 | 0x2 | 0x8;
    return SUCCESS;
}

int nvmlDeviceRegisterEvents(device_t *device, unsigned long long types, void *set) {
    (void)device; (void)types; (void)set;
    return SUCCESS;
}

/* Blocks in the driver like the real one: on the FIFO if there is one, else for the whole time-out. */
int nvmlEventSetWait_v2(void *set, event_t *event, unsigned timeout_ms) {
    static FILE *events;
    unsigned index;
    (void)set;
    const char *path = getenv("FAKE_NVML_EVENTS");
    if (path && !events) events = fopen(path, "r+");
    if (!events) { usleep(timeout_ms * 1000ULL); return TIMEOUT; }
    memset(event, 0, sizeof *event);
    if (fscanf(events, "%u %llu %llu", &index, &event->type, &event->data) != 3 || index >= 16)
        return INVALID_ARGUMENT;
    if (event->type == 0) { lost[index] = 1; return GPU_IS_LOST; }
    devices[index].index = index;
    event->device = &devices[index];
    return SUCCESS;
}
