/* Looks at what a replay depends on, without Python: `optimizations.host_code` says when and by whom this is compiled.

   All but two of these types compare. Which words of memory, and what they mean, is the business of whoever makes
   these objects; they hold the objects whose memory they read. Nothing gives Python's lock away, and little is
   allocated: the lists that `Looks`, `Nest` and `Bound` return, and numbers. `Versions` counts up,
   and `Bound` puts values into dicts. */

#include "common.h"
#include "writes.c"

#include "bound.c"
#include "entries.c"
#include "looks.c"
#include "nest.c"
#include "settings.c"
#include "versions.c"
#include "words.c"

#define TYPE(variable, name, structure, make, clear, traverse, release)                                             \
    static PyTypeObject variable = {                                                                                 \
        PyVarObject_HEAD_INIT(NULL, 0).tp_name = "encore_looks." name,                                               \
        .tp_basicsize = sizeof(structure),                                                                           \
        .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL,                            \
        .tp_vectorcall_offset = offsetof(Holder, call),                                                              \
        .tp_call = PyVectorcall_Call,                                                                                \
        .tp_new = make,                                                                                              \
        .tp_traverse = traverse,                                                                                     \
        .tp_clear = clear,                                                                                           \
        .tp_dealloc = release,                                                                                       \
    }

TYPE(words_type, "Words", Words, words_new, words_clear, holder_traverse, words_free);
TYPE(bound_type, "Bound", Holder, bound_new, nothing_to_clear, holder_traverse, holder_free);
TYPE(entries_type, "Entries", Entries, entries_new, entries_clear, entries_traverse, entries_free);
TYPE(looks_type, "Looks", Looks, looks_new, looks_clear, holder_traverse, looks_free);
TYPE(settings_type, "Settings", Holder, settings_new, nothing_to_clear, holder_traverse, holder_free);
TYPE(nest_type, "Nest", Holder, nest_new, nothing_to_clear, holder_traverse, holder_free);
TYPE(versions_type, "Versions", Versions, versions_new, nothing_to_clear, holder_traverse, holder_free);

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, .m_name = "encore_looks", .m_size = -1};

PyMODINIT_FUNC PyInit_encore_looks(void) {
    PyObject *module = PyModule_Create(&definition);
    if (!module) return NULL;
    PyTypeObject *types[] = {&words_type, &entries_type, &looks_type, &settings_type, &nest_type, &versions_type,
                             &bound_type};
    for (size_t index = 0; index < sizeof types / sizeof *types; index++) {
        if (PyModule_AddType(module, types[index]) < 0) {
            Py_DECREF(module);
            return NULL;
        }
    }
#if HAS_WATCHERS
    watcher = PyDict_AddWatcher(written);
    if (watcher < 0) PyErr_Clear(); /* all are taken: dicts are asked one by one */
#endif
    return module;
}
