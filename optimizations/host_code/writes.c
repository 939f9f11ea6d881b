/* What was written into dicts that are watched: the last writes, by dict and key, in the order in which Python tells. */

/* Watchers of dicts came with 3.12. */
#define HAS_WATCHERS (PY_VERSION_HEX >= 0x030C0000)

/* Which dict, and which key got another value: NULL where it may be any key, or be there no more. Neither is held.
   A dict of which somebody holds a reference since before the write is this one, and a key likewise. */
typedef struct { PyObject *dict, *key; } Write;

#define REMEMBERED 256 /* a power of two */
static Write last_writes[REMEMBERED];
static uint64_t writes = 1; /* into any dict that is watched */
static int watcher = -1;

/* Equal strings of this kind are one object. */
static int is_interned(PyObject *key) { return PyUnicode_CheckExact(key) && PyUnicode_CHECK_INTERNED(key); }

static int are_interned(PyObject *keys) {
    for (Py_ssize_t index = 0; index < PyTuple_GET_SIZE(keys); index++)
        if (!is_interned(PyTuple_GET_ITEM(keys, index))) return 0;
    return 1;
}

#if HAS_WATCHERS
static int written(PyDict_WatchEvent event, PyObject *dict, PyObject *key, PyObject *value) {
    int one_value = event == PyDict_EVENT_MODIFIED && key && is_interned(key);
    last_writes[writes++ % REMEMBERED] = (Write){dict, one_value ? key : NULL};
    return 0;
}
#endif

/* A place for each dict, found by its address. */
typedef struct { PyObject *dict; Py_ssize_t place; } Slot;
typedef struct { Slot *slots; size_t mask; } Table;

static size_t first_slot(const Table *table, PyObject *dict) {
    return (size_t)(((uintptr_t)dict >> 4) * (uintptr_t)0x9E3779B97F4A7C15u >> 16) & table->mask;
}

/* A table with room for so many; false with an error where there is no memory. */
static int table_made(Table *table, Py_ssize_t count) {
    size_t size = 8;
    while (size < 2 * (size_t)count) size *= 2;
    table->mask = size - 1;
    if ((table->slots = PyMem_Calloc(size, sizeof(Slot)))) return 1;
    PyErr_NoMemory();
    return 0;
}

/* The place of a dict, -1 if it has none. */
static Py_ssize_t place_of(const Table *table, PyObject *dict) {
    for (size_t slot = first_slot(table, dict); table->slots[slot].dict; slot = (slot + 1) & table->mask)
        if (table->slots[slot].dict == dict) return table->slots[slot].place;
    return -1;
}

static void place_at(Table *table, PyObject *dict, Py_ssize_t place) {
    size_t slot = first_slot(table, dict);
    while (table->slots[slot].dict && table->slots[slot].dict != dict) slot = (slot + 1) & table->mask;
    table->slots[slot] = (Slot){dict, place};
}
