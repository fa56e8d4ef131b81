{{/* Rules between values, which the schema cannot put into words. Each refusal names the values and the way out. */}}
{{- define "baton.checks" -}}
{{- include "baton.nameChecks" . -}}
{{- $registry := .Values.registry -}}
{{- if and (eq $registry.type "external") (not $registry.endpoints) -}}
  {{- fail "registry.type is external, but registry.endpoints is empty; list your etcd's HOST:PORT there" -}}
{{- end -}}
{{- if and (ne $registry.type "external") $registry.endpoints -}}
  {{- fail (printf "registry.endpoints is set, but registry.type is %s; set it to external to use them" $registry.type) -}}
{{- end -}}
{{- if eq $registry.type "embedded" -}}
  {{- if or (gt (int .Values.router.replicas) 1) .Values.router.autoscaling.enabled -}}
    {{- fail "registry.type is embedded, where a second router would know none of the workers; set router.replicas to 1 and router.autoscaling.enabled to false, or registry.type to etcd" -}}
  {{- end -}}
{{- end -}}
{{- if and (gt (int .Values.etcd.replicas) 1) (not .Values.etcd.persistence.enabled) -}}
  {{- fail (printf "etcd.replicas is %d, and a member of several must find its data again; set etcd.persistence.enabled to true, or etcd.replicas to 1" (int .Values.etcd.replicas)) -}}
{{- end -}}
{{- if ne .Values.tls.mode "none" -}}
  {{- range $where, $config := dict "router.config" .Values.router.config "workers.config" .Values.workers.config "prefill.config" .Values.prefill.config "decode.config" .Values.decode.config "kvStore.config" .Values.kvStore.config -}}
    {{- range $setting := list "tls" "tls_cert" "tls_key" "tls_ca" "insecure_internal" -}}
      {{- if hasKey $config $setting -}}
        {{- fail (printf "%s.%s is set, but tls.mode is %s; set that to none to go on with files of yours, or to given to name Secrets" $where $setting $.Values.tls.mode) -}}
      {{- end -}}
    {{- end -}}
  {{- end -}}
{{- end -}}
{{- if and (eq .Values.tls.mode "cert-manager") (not .Values.tls.issuerRef.name) -}}
  {{- fail "tls.mode is cert-manager, but tls.issuerRef.name is empty; name an Issuer of yours there" -}}
{{- end -}}
{{- if and (eq .Values.tls.mode "none") .Values.registry.tls -}}
  {{- fail "registry.tls needs certificates, but tls.mode is none; set it to generated, cert-manager or given" -}}
{{- end -}}
{{- if and (eq .Values.modelCache.type "existing") (not .Values.modelCache.existing.claimName) -}}
  {{- fail "modelCache.type is existing, but modelCache.existing.claimName is empty; name your claim there" -}}
{{- end -}}
{{- if and .Values.modelCache.emptyDir.share (ne .Values.modelCache.type "emptyDir") -}}
  {{- fail (printf "modelCache.emptyDir.share is true, but modelCache.type is %s, so that all pods have one volume; set it to false" .Values.modelCache.type) -}}
{{- end -}}
{{- if and .Values.modelCache.emptyDir.share (not (regexMatch "^[^/:.][^/:]*/[^/]" .Values.model)) -}}
  {{- fail (printf "modelCache.emptyDir.share is true, but model is %s, which does not come from a hub; set it to false" .Values.model) -}}
{{- end -}}
{{- if .Values.modelCache.job.enabled -}}
  {{- if eq .Values.modelCache.type "emptyDir" -}}
    {{- fail "modelCache.job.enabled is true, but modelCache.type is emptyDir, which each pod has for itself; set modelCache.type to claim or existing" -}}
  {{- end -}}
  {{- if not (include "baton.modelIsFetched" .) -}}
    {{- fail (printf "modelCache.job.enabled is true, but model is %s, which is not fetched; set it to false" .Values.model) -}}
  {{- end -}}
{{- end -}}
{{- if .Values.keys.secretName -}}
  {{- if .Values.router.config.keys_file -}}
    {{- fail "keys.secretName and router.config.keys_file both name a keys file; set one of them" -}}
  {{- end -}}
  {{- if .Values.router.config.registry_on_grpc -}}
    {{- fail "keys.secretName is set, but with router.config.registry_on_grpc clients could register workers without a key; set it to false" -}}
  {{- end -}}
{{- end -}}
{{- with .Values.router.httpRoute -}}
  {{- if and .enabled (not .parentRefs) -}}
    {{- fail "router.httpRoute.enabled is true, but router.httpRoute.parentRefs is empty; name your Gateway there" -}}
  {{- end -}}
{{- end -}}
{{- with .Values.monitoring -}}
  {{- if and .podMonitor.enabled .serviceMonitor.enabled -}}
    {{- fail "monitoring.podMonitor.enabled and monitoring.serviceMonitor.enabled are true, so all would be scraped twice; set one of them to false" -}}
  {{- end -}}
  {{- $alerts := list -}}
  {{- range ($.Files.Get "files/alerts.yaml" | fromYaml).groups -}}
    {{- range .rules -}}
      {{- $alerts = append $alerts .alert -}}
    {{- end -}}
  {{- end -}}
  {{- range $alert, $limit := .rules.thresholds -}}
    {{- if not (has $alert $alerts) -}}
      {{- fail (printf "monitoring.rules.thresholds has %s, but there is no such alert; there are %s" $alert (join ", " $alerts)) -}}
    {{- end -}}
  {{- end -}}
{{- end -}}
{{- if and .Values.workers.rdma.resource (not (include "baton.ucxPorts" (dict "root" . "role" "decode"))) -}}
  {{- fail "workers.rdma.resource is set, but workers.config.transport is not ucx, so KV would not go by RDMA; set it to ucx, or workers.rdma.resource to \"\"" -}}
{{- end -}}
{{- if and .Values.workers.hostNetwork .Values.workers.sockets.hostPath -}}
  {{- fail "workers.sockets.hostPath is set, but with workers.hostNetwork no two workers run on a node; set one of them only" -}}
{{- end -}}
{{- if and .Values.workers.hostNetwork .Values.networkPolicy.enabled (ne .Values.registry.type "external") (not .Values.networkPolicy.nodes) -}}
  {{- fail "workers.hostNetwork is true, so workers have addresses of nodes, which network policies keep away from the registry; list these in networkPolicy.nodes, such as 10.0.0.0/16" -}}
{{- end -}}
{{- range $role := list "router" "prefill" "decode" -}}
  {{- $c := get $.Values $role -}}
  {{- with $c.autoscaling -}}
    {{- if and .enabled (gt (int .minReplicas) (int .maxReplicas)) -}}
      {{- fail (printf "%s.autoscaling.minReplicas is %d, more than maxReplicas, which is %d" $role (int .minReplicas) (int .maxReplicas)) -}}
    {{- end -}}
    {{- $by := .by | default "" -}}
    {{- if and .enabled (ne $role "router") (not $by) (not .metrics) -}}
      {{- fail (printf "%s.autoscaling.by is empty; say how the load is known: adapter, keda, keda-prometheus or cpu" $role) -}}
    {{- end -}}
    {{- if and .enabled (eq $by "keda") (eq $.Values.ipFamily "IPv6") -}}
      {{- fail (printf "%s.autoscaling.by is keda, which cannot ask pods with IPv6 addresses; set it to keda-prometheus or adapter" $role) -}}
    {{- end -}}
    {{- if and .enabled (hasPrefix "keda" $by) .metrics -}}
      {{- fail (printf "%s.autoscaling.metrics are for a HorizontalPodAutoscaler, but by is %s; empty them, or set by to adapter" $role $by) -}}
    {{- end -}}
    {{- if and .enabled (eq $by "keda-prometheus") (not $.Values.keda.prometheus.serverAddress) -}}
      {{- fail (printf "%s.autoscaling.by is keda-prometheus, but keda.prometheus.serverAddress is empty; set it to Prometheus's address" $role) -}}
    {{- end -}}
  {{- end -}}
  {{- $none := list "0" "0%" -}}
  {{- if and (has (toString $c.rollout.maxSurge) $none) (has (toString $c.rollout.maxUnavailable) $none) -}}
    {{- fail (printf "%s.rollout allows neither a pod more nor one less, so no rollout could start; raise maxSurge or maxUnavailable" $role) -}}
  {{- end -}}
  {{- $settings := include "baton.settings" (dict "root" $ "role" $role) | fromYaml -}}
  {{- $limits := ($c.resources).limits | default dict -}}
  {{- if and (eq (toString $settings.backend) "cuda") (hasKey $limits "nvidia.com/gpu") -}}
    {{- $ranks := int ($settings.tp | default 1) -}}
    {{- if ne (int (get $limits "nvidia.com/gpu")) $ranks -}}
      {{- fail (printf "%s has backend cuda with tp %d, and each rank takes a GPU, but %s.resources.limits has nvidia.com/gpu: %v; make both the same" $role $ranks $role (get $limits "nvidia.com/gpu")) -}}
    {{- end -}}
  {{- end -}}
{{- end -}}
{{- if .Values.kvStore.enabled -}}
  {{- include "baton.kvStoreChecks" . -}}
{{- end -}}
{{- end -}}

{{/* The prefix of all names may be too long for some kinds: Kubernetes appends up to 11 characters to the name of a StatefulSet, in a label, and to
that of a CronJob, and 63 is the limit for both and for a Job's. The shortest limit comes first. Takes the root. */}}
{{- define "baton.nameChecks" -}}
{{- $name := include "baton.fullname" . -}}
{{- $limits := list -}}
{{- if .Values.kvStore.enabled -}}
  {{- $limits = append $limits (list 43 "kvStore.enabled is true" "the StatefulSet of stores") -}}
{{- end -}}
{{- if eq .Values.tls.mode "generated" -}}
  {{- $limits = append $limits (list 46 "tls.mode is generated" "the CronJob that renews certificates") -}}
{{- end -}}
{{- if eq .Values.registry.type "etcd" -}}
  {{- $limits = append $limits (list 47 "registry.type is etcd" "the StatefulSet of etcd") -}}
{{- end -}}
{{- if .Values.modelCache.job.enabled -}}
  {{- $limits = append $limits (list 47 "modelCache.job.enabled is true" "the Job that fetches the model") -}}
{{- end -}}
{{- range $limits -}}
  {{- if gt (len $name) (first .) -}}
    {{- fail (printf "%s, and objects are called %s-…, which is too long for %s; set fullnameOverride to at most %d characters" (index . 1) $name (last .) (first .)) -}}
  {{- end -}}
{{- end -}}
{{- end -}}
