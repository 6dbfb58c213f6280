/* A program that embeds Python, as services and simulators do: its arguments are its own, and it always runs the Python
 * program $EMBEDDING_PROGRAM. It adds a byte to $EMBEDDING_STARTS at each start, and refuses more than MOST_STARTS: a
 * launcher that takes it for an interpreter must not make it start itself for ever.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#define MOST_STARTS 8

int main(int argc, char **argv) {
    PyConfig config;
    FILE *starts = fopen(getenv("EMBEDDING_STARTS"), "a");
    if (starts == NULL || fputc('x', starts) == EOF || fflush(starts) || ftell(starts) > MOST_STARTS)
        return 9;
    fclose(starts);
    PyConfig_InitPythonConfig(&config);
    config.parse_argv = 0;
    PyConfig_SetBytesString(&config, &config.program_name, argv[0]);
    PyConfig_SetBytesString(&config, &config.home, getenv("EMBEDDING_HOME"));
    PyConfig_SetBytesArgv(&config, argc, argv);
    if (PyStatus_Exception(Py_InitializeFromConfig(&config)))
        return 3;
    FILE *program = fopen(getenv("EMBEDDING_PROGRAM"), "r");
    int failed = PyRun_SimpleFile(program, getenv("EMBEDDING_PROGRAM"));
    return Py_FinalizeEx() < 0 || failed;
}
