/* Whether functions give what they gave. */

static PyObject *settings_call(PyObject *object, PyObject *const *args, size_t count, PyObject *names) {
    if (PyVectorcall_NARGS(count) || names) return no_arguments();
    PyObject *functions = PyTuple_GET_ITEM(((Holder *)object)->held, 0);
    PyObject *values = PyTuple_GET_ITEM(((Holder *)object)->held, 1);
    for (Py_ssize_t index = 0; index < PyTuple_GET_SIZE(functions); index++) {
        PyObject *found = PyObject_CallNoArgs(PyTuple_GET_ITEM(functions, index));
        if (!found) return NULL;
        PyObject *wanted = PyTuple_GET_ITEM(values, index);
        int same = found == wanted;
        if (!same && Py_TYPE(found) == Py_TYPE(wanted)) same = PyObject_RichCompareBool(found, wanted, Py_EQ);
        Py_DECREF(found);
        if (same < 0) return NULL;
        if (!same) Py_RETURN_FALSE;
    }
    Py_RETURN_TRUE;
}

/* Settings(functions, values): tuples of the same length. */
static PyObject *settings_new(PyTypeObject *type, PyObject *args, PyObject *names) {
    PyObject *functions, *values;
    if (!no_names(names) || !PyArg_ParseTuple(args, "O!O!", &PyTuple_Type, &functions, &PyTuple_Type, &values))
        return NULL;
    if (PyTuple_GET_SIZE(functions) != PyTuple_GET_SIZE(values)) {
        PyErr_SetString(PyExc_ValueError, "as many values as functions");
        return NULL;
    }
    return holder_of_two(type, settings_call, functions, values);
}
