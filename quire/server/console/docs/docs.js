// Show the server's own description of its routes. Nothing is asked of other servers.

SwaggerUIBundle({
  url: "openapi.json",
  dom_id: "#docs",
  validatorUrl: null,
  displayRequestDuration: true,
  defaultModelsExpandDepth: 0,
});
