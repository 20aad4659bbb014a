// Pyodide in a worker, so that a policy that does not terminate does not block the page.
//
// The first message contains Pyodide's files, checked by hash, and the project's modules. Each later message is a
// question for `simulate.answer`, and the reply is its JSON.

let simulate = null;

async function start({ files, sources, lock }) {
  // Serve Pyodide's requests from the files in memory, so that it needs no network
  self.fetch = async (address) => {
    const name = String(address?.url ?? address).split("/").pop();
    const type = name.endsWith(".wasm") ? "application/wasm" : "application/octet-stream";
    if (!files[name]) throw new Error(`${name} is not among the files`);
    return new Response(files[name], { headers: { "content-type": type } });
  };
  const module = async (name) => {
    const address = URL.createObjectURL(new Blob([files[name]], { type: "text/javascript" }));
    return import(address);
  };
  const { loadPyodide } = await module("pyodide.mjs");
  const { default: createPyodideModule } = await module("pyodide.asm.mjs");
  const python = await loadPyodide({
    indexURL: "https://files.invalid/",
    packageBaseUrl: "https://files.invalid/",
    lockFileContents: lock,
    createPyodideModule,
  });
  for (const [path, text] of Object.entries(sources)) {
    python.FS.mkdirTree(path.split("/").slice(0, -1).join("/") || ".");
    python.FS.writeFile(path, text);
  }
  simulate = python.pyimport("simulate");
  return simulate.start();
}

self.onmessage = async ({ data }) => {
  try {
    const answer = data.question ? simulate.answer(data.question) : await start(data);
    self.postMessage({ answer });
  } catch (error) {
    self.postMessage({ failed: String(error.message ?? error) });
  }
};
